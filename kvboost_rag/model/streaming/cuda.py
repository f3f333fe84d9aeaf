"""The real device. Without a GPU, this file is tested over a pretended one (``tests/pretend.py``) only."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.streaming.backend import Stream

logger = logging.getLogger(__name__)


class CudaBackend:
    """One CUDA device: copies run on a stream of their own, computation on whatever stream is current.

    ``device`` is resolved to an index, so that "cuda" means the same device for good.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        found = torch.device(device)
        index = torch.cuda.current_device() if found.index is None else found.index
        self.device = torch.device("cuda", index)
        self._copy = torch.cuda.Stream(self.device)
        self._runtime: Any = torch.cuda.cudart()

    def _stream(self, stream: Stream) -> Any:
        return self._copy if stream == "copy" else torch.cuda.current_stream(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as e:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise CapacityError(
                f"{nbytes / 2**30:.2f} GiB do not fit on {self.device}, {free / 2**30:.2f} GiB are free",
                hint="give a smaller vram= or store_vram=, or close what else runs on the GPU",
            ) from e

    def register(self, block: torch.Tensor) -> bool:
        with torch.cuda.device(self.device):
            code = int(self._runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if code:
            logger.info("cudaHostRegister of %.2f GiB was refused (error %d)", block.numel() / 2**30, code)
            self._forget_error()
        return code == 0

    def _forget_error(self) -> None:
        """The runtime remembers its last error, and the next kernel's launch would report it as its own: launch one
        that may. (torch has no call for it.)"""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(1.0)

    def unregister(self, block: torch.Tensor) -> None:
        """Called by finalizers too, in any thread: whose device is another."""
        with torch.cuda.device(self.device):
            code = int(self._runtime.cudaHostUnregister(block.data_ptr()))
        if code:
            logger.info("cudaHostUnregister failed (error %d)", code)
            self._forget_error()

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as e:
            logger.info("pinned memory of %.2f GiB was refused: %s", nbytes / 2**30, e)
            return None

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: Any, stream: Stream) -> None:
        event.record(self._stream(stream))

    def wait(self, stream: Stream, event: Any) -> None:
        self._stream(stream).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(target, source)

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def happened(self, event: Any) -> bool:
        return bool(event.query())

    def use(self, slot: torch.Tensor) -> None:
        pass

    def done(self, slot: torch.Tensor) -> None:
        pass

    def seconds(self, start: Any, end: Any) -> float | None:
        return float(start.elapsed_time(end)) / 1e3 if end.query() else None

    def measure(self, target: torch.Tensor, source: torch.Tensor) -> float | None:
        torch.cuda.synchronize(self.device)  # what was enqueued may still use this memory
        best = float("inf")
        for _ in range(3):
            start, end = self.event(), self.event()
            self.record(start, "copy")
            self.copy(target, source)
            self.record(end, "copy")
            end.synchronize()
            best = min(best, float(start.elapsed_time(end)) / 1e3)
        return best

    def memory(self) -> tuple[int, int] | None:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)
