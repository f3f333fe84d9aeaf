"""Memory of a device for what a store holds, safe whatever was enqueued.

torch gives memory that was freed to the next who asks **on the same stream**, at once: kernels that still read it come
first there anyway. So memory is allocated, and filled, on the stream that computes: a thread's current stream, which is
the device's default one for requests, loaders and writers alike, unless somebody chose another. Who did is covered too:
what is handed out waits for the copy (an event), and is noted as used by the stream that takes it, so that it is not
given away before that stream is done.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.errors import UsageError
from kvboost_rag.store.held import owns_its_memory


class DeviceMemory:
    """Memory of one device. On a CPU it is ordinary memory, for tests. ``device`` is resolved to an index."""

    def __init__(self, device: torch.device | str) -> None:
        found = torch.device(device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"a tier on {found}, and there is no CUDA device", hint="memory_bytes= is for host memory")
        self.device = torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found

    def own(self, source: torch.Tensor, *, adopt: bool = False) -> tuple[torch.Tensor, Any]:
        """A copy of ``source`` here, and what :meth:`lend` waits for. ``adopt``: ``source`` itself, if it lies here and
        has memory of its own. A source on the device has been computed, or is about to be by this thread's stream.

        Raises:
            torch.OutOfMemoryError: the device has no more.
        """
        own = source.detach()
        if not (adopt and own.device == self.device and owns_its_memory(own)):
            own = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            own.copy_(source.detach())  # waits for host memory: nobody needs to keep the source
        if self.device.type != "cuda":
            return own, None
        stream, ready = torch.cuda.current_stream(self.device), torch.cuda.Event()
        if source.device == self.device:
            source.record_stream(stream)
        ready.record(stream)
        return own, ready

    def lend(self, tensor: torch.Tensor, ready: Any) -> None:
        """``tensor`` is read by this thread's stream from here on."""
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            tensor.record_stream(stream)
