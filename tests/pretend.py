"""A GPU that is not there: tensors that say they are on ``cuda:0``, hold their numbers in host memory, and refuse what a
GPU would refuse.

Mixing devices is the fault that a CPU cannot show: there, everything is on one. Under :func:`pretend_gpu`, what is made
with ``device="cuda"`` or moved there is a :class:`PretendTensor`; an operation over it and an ordinary tensor raises as
CUDA's would (but for what CUDA allows: copies, zero-dimensional numbers, indices in host memory), and operations for which
the host would wait are counted. Kernels are the CPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.pretend_cuda import Event, Runtime, Stream

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
# What CUDA allows with tensors of both kinds.
CROSSING = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# For these the host waits until the device has come so far.
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.unique_consecutive.default, aten._unique2.default,
}  # fmt: skip
NOT_ON_A_CPU = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default}


class PretendTensor(torch.Tensor):
    """``held`` is where the numbers are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        assert type(held) is torch.Tensor, type(held)
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device="meta", requires_grad=False,  # what torch's own C++ sees: built without CUDA, it knows no such device
        )  # fmt: skip
        made.held = held
        return made  # type: ignore[no-any-return]

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Rules(None):
            return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """What happened on the device."""

    waits: Counter[str] = field(default_factory=Counter)
    to_device: int = 0  # bytes copied there from ordinary memory
    to_host: int = 0
    calls: int = 0
    runtime: Runtime = field(default_factory=Runtime)


class _Rules(TorchDispatchMode):
    def __init__(self, seen: Seen | None) -> None:
        super().__init__()
        self.seen = seen or _current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        here = [x for x in flat if isinstance(x, PretendTensor)]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta" and not _Calls.meta_is_meant:
            device = GPU  # torch's C++, which takes ours for meta tensors, makes another one of the kind
        if not here and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)
        self._check(func, args, flat, here)
        if here:
            self.seen.calls += 1
        to = GPU if device is None and here else torch.device(device) if device is not None else None
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        self._count(func, args, here, to)
        if func is aten._fused_sdp_choice.default:
            return 0  # plain products: the device's kernels are not here
        if func is aten._scaled_dot_product_efficient_attention.default:
            return tree_map(
                lambda x: self._wrap(x, here), _efficient(*tree_map(_real, args), **tree_map(_real, kwargs))
            )
        if func in NOT_ON_A_CPU:
            raise RuntimeError(f"{func} is not there on the pretended device")
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        found = func(*real_args, **real_kwargs)
        return found if to is None or to.type == "cpu" else tree_map(lambda x: self._wrap(x, here), found)

    @staticmethod
    def _wrap(found: Any, here: list[PretendTensor]) -> Any:
        if type(found) is not torch.Tensor:
            return found
        same = next((x for x in here if x.held is found), None)  # in place
        return PretendTensor(found) if same is None else same

    @staticmethod
    def _check(func: Any, args: Any, flat: list[torch.Tensor], here: list[PretendTensor]) -> None:
        others = [x for x in flat if not isinstance(x, PretendTensor) and x.dim() > 0]
        if not here or not others or func in CROSSING:
            return
        if func in INDEXING and isinstance(args[0], PretendTensor):
            values = args[2] if len(args) > 2 else None
            if not isinstance(values, torch.Tensor) or isinstance(values, PretendTensor) or values.dim() == 0:
                return  # indices may lie in host memory
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({func}, "
            f"{[(tuple(x.shape), x.device.type) for x in flat]})"
        )

    def _count(self, func: Any, args: Any, here: list[PretendTensor], to: torch.device | None) -> None:
        if func in WAITING:
            self.seen.waits[str(func)] += 1
        if func in INDEXING:
            indices = args[1]
            if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.seen.waits["index by mask"] += 1
            if any(isinstance(i, torch.Tensor) and not isinstance(i, PretendTensor) and i.dim() for i in indices):
                self.seen.waits["index in host memory"] += 1
        if func is aten._to_copy.default and to is not None:
            source = args[0]
            if isinstance(source, PretendTensor) and to.type == "cpu":
                self.seen.to_host += source.nbytes
                self.seen.waits["copy to host"] += 1
            elif not isinstance(source, PretendTensor) and to.type == "cuda":
                self.seen.to_device += source.nbytes
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            if isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
                self.seen.to_host += source.nbytes
                self.seen.waits["copy to host"] += 1
            elif isinstance(target, PretendTensor) and not isinstance(source, PretendTensor):
                self.seen.to_device += source.nbytes


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, with_lse: bool,
    dropout: float = 0.0, causal: bool = False, *, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """torch's memory-efficient kernel, as far as it can be told from its documentation: no shared heads, rows of the bias
    aligned, log-sum-exp in fp32 and padded to 32 rows."""
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "heads are not shared"
    assert bias is None or (bias.dim() == 4 and bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0), "unaligned bias"
    rows, keys = query.shape[2], key.shape[2]
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if bias is not None:
        scores += bias.float()
    if causal:
        scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu_(1), float("-inf"))
    lse = torch.full((*query.shape[:2], -(-rows // 32) * 32), float("inf"))
    lse[..., :rows] = scores.logsumexp(-1)
    out = (scores.softmax(-1).nan_to_num() @ value.float()).to(query.dtype)
    return out, lse, torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)


def _real(x: Any) -> Any:
    return x.held if isinstance(x, PretendTensor) else x


class _Calls(TorchFunctionMode):
    """What is known only where Python calls torch: that a meta tensor is meant (a model without weights is being made),
    and that a device was named without its index, for which torch would ask the driver."""

    meta_is_meant = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        args, kwargs = tree_map(_indexed, (args, kwargs or {}))
        before = _Calls.meta_is_meant
        _Calls.meta_is_meant = "meta" in (torch.get_default_device().type, str(kwargs.get("device")))
        try:
            return func(*args, **kwargs)
        finally:
            _Calls.meta_is_meant = before


def _indexed(x: Any) -> Any:
    return (
        GPU
        if (isinstance(x, str) and x == "cuda") or (isinstance(x, torch.device) and x == torch.device("cuda"))
        else x
    )


_current = Seen()


@contextmanager
def pretend_gpu() -> Iterator[Seen]:
    """``cuda:0`` exists inside the ``with`` block (say the index: torch's C++ asks for it otherwise)."""
    global _current
    seen = _current = Seen()
    generator = torch.Generator
    instead: dict[tuple[Any, str], Any] = {
        (torch.cuda, "_lazy_init"): lambda: None,
        (torch.cuda, "get_device_capability"): lambda device=None: (9, 0),
        (torch.cuda, "synchronize"): lambda device=None: None,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "device_count"): lambda: 1,
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "mem_get_info"): lambda device=None: (60 << 30, 80 << 30),
        (torch.cuda, "Stream"): Stream,
        (torch.cuda, "Event"): Event,
        (torch.cuda, "current_stream"): lambda device=None: Stream(),
        (torch.cuda, "stream"): lambda stream: nullcontext(),
        (torch.cuda, "device"): lambda device: nullcontext(),
        (torch.cuda, "cudart"): lambda: seen.runtime,
        (torch, "Generator"): lambda device=None: generator("cpu"),
        (torch.inference_mode, "__enter__"): lambda self: _grad_off(self).__enter__(),
        (torch.inference_mode, "__exit__"): lambda self, *exc: _grad_off(self).__exit__(*exc),
    }
    before = {(owner, name): getattr(owner, name) for owner, name in instead}
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) makes it in host memory, then moves it
    try:
        for (owner, name), value in instead.items():
            setattr(owner, name, value)
        with torch.no_grad(), _Rules(seen), _Calls():
            yield seen
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        torch._C._set_only_lift_cpu_tensors(lifts)


def _grad_off(mode: Any) -> Any:
    """Instead of ``torch.inference_mode``, in which views of a subclass cannot be made."""
    if not hasattr(mode, "instead"):
        mode.instead = torch.no_grad()
    return mode.instead


def move(model: nn.Module) -> nn.Module:
    """Parameters and buffers of ``model`` to the pretended device. Inside of :func:`pretend_gpu`."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if id(p) not in moved:
                    moved[id(p)] = nn.Parameter(PretendTensor(p.detach()), requires_grad=False)
                module._parameters[name] = moved[id(p)]
        for name, b in list(module._buffers.items()):
            if b is not None and type(b) is torch.Tensor:
                module._buffers[name] = PretendTensor(b.detach())
    return model
