"""Chunks packed into one row of tokens: attention in which none sees another, without padding.

Every chunk sees one shared context and itself. The two are computed apart and merged by log-sum-exp: the context's keys
are read where they lie, for all chunks at once, and are never copied; behind it each chunk attends causally to itself,
in one launch of a flash kernel for variable lengths where there is one, else chunk by chunk. Exact either way.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost_rag.model.paged.partial import Partial, attend_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segments:
    """Independent attentions packed one behind the other: rows ``[rows[i], rows[i + 1])`` see the keys ``[keys[i],
    keys[i + 1])``. ``row_ends`` and ``key_ends`` are the same numbers as int32 on the device: made once, so that no
    layer waits for a copy."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    row_ends: torch.Tensor
    key_ends: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[int], keys: Sequence[int], device: torch.device, *, causal: bool) -> Segments:
        """From the number of rows and of keys of each."""
        ends = [tuple(itertools.accumulate(lengths, initial=0)) for lengths in (rows, keys)]
        tensors = [torch.tensor(e, dtype=torch.int32, device=device) for e in ends]
        return cls(ends[0], ends[1], causal, tensors[0], tensors[1])

    @property
    def longest(self) -> tuple[int, int]:
        """The most rows and the most keys of any of them."""
        rows, keys = (max(b - a for a, b in itertools.pairwise(ends)) for ends in (self.rows, self.keys))
        return rows, keys


# query [Hkv, G, T, D], key and value [Hkv, K, D], segments, scaling -> out and log-sum-exp of every row
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, float], Partial]


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """What computes packed attention, and why that."""

    name: str
    reason: str
    run: Run


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float
) -> Partial:
    """Segment by segment, on any device and in any dtype."""
    parts = [
        attend_part(query[:, :, a:b], key[:, c:d], value[:, c:d], scaling, causal=segments.causal)
        for (a, b), (c, d) in zip(itertools.pairwise(segments.rows), itertools.pairwise(segments.keys), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


ONE_BY_ONE = PackedKernel("one by one", "default", one_by_one)


def _flash_attn(query: Any, key: Any, value: Any, segments: Segments, scaling: float) -> tuple[Any, Any]:
    from flash_attn import flash_attn_varlen_func

    out, lse, _ = flash_attn_varlen_func(
        query, key, value, segments.row_ends, segments.key_ends, *segments.longest,
        softmax_scale=scaling, causal=segments.causal, return_attn_probs=True,
    )  # fmt: skip
    return out, lse


def _varlen(query: Any, key: Any, value: Any, segments: Segments, scaling: float) -> tuple[Any, Any]:
    from torch.nn.attention.varlen import AuxRequest

    out, lse = varlen_attention(
        query, key, value, segments.row_ends, segments.key_ends, segments.longest, scaling,
        causal=segments.causal, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, lse


def varlen_attention(
    query: Any, key: Any, value: Any, row_ends: Any, key_ends: Any, longest: tuple[int, int], scaling: float,
    *, causal: bool, **options: Any,
) -> Any:  # fmt: skip
    """torch's ``varlen_attn`` over ``query [T, H, D]`` and ``key, value [K, Hkv, D]``, whose options changed from one
    version of torch to the next: 2.10 knows ``is_causal`` and its own scale alone, 2.11 has ``window_size`` and
    ``scale``, 2.12 asks for ``enable_gqa`` where heads differ (the kernel below always could)."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "scale" in known:
        options["scale"] = scaling
    elif abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
        raise NotImplementedError("this torch's varlen_attn has a scale of its own")
    if "enable_gqa" in known:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if causal:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return varlen_attn(query, key, value, row_ends, key_ends, *longest, **options)


def _folded(run: Callable[..., tuple[Any, Any]]) -> Run:
    """A flash kernel's call in our shapes. Strided views are passed as they are: the kernels read strides."""

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float
    ) -> Partial:
        kv_heads, groups, rows, dim = query.shape
        heads = kv_heads * groups
        if rows == heads:  # its log-sum-exp could be read either way round
            return one_by_one(query, key, value, segments, scaling)
        flat = query.reshape(heads, rows, dim).transpose(0, 1)
        out, lse = run(flat, key.transpose(0, 1), value.transpose(0, 1), segments, scaling)
        lse = lse if tuple(lse.shape) == (heads, rows) else lse.transpose(0, 1)
        folded: torch.Tensor = out.transpose(0, 1).reshape(kv_heads, groups, rows, dim)
        return folded.float(), lse.reshape(kv_heads, groups, rows).float()

    return call


_KERNELS: dict[str, Run] = {"flash-attn": _folded(_flash_attn), "varlen": _folded(_varlen)}


def choose_packed(
    name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> PackedKernel:
    """The packed form of the kernel ``name`` (see ``kernels.py``) if it agrees with plain products on this device, else
    segment by segment. ``heads``: (query heads, key heads)."""
    run = _KERNELS.get(name)
    if run is None:
        return PackedKernel("one by one", f"{name} has no form for packed chunks", one_by_one)
    problem = _problem(run, device, dtype, heads, head_dim)
    if problem:
        logger.info("packed chunks are attended to one by one: %s: %s", name, problem)
        return PackedKernel("one by one", f"{name}: {problem}", one_by_one)
    return PackedKernel(name, "agrees with plain products here", run)


def _problem(run: Run, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> str:
    """What is wrong with a kernel on this device ("" if nothing)."""
    generator = torch.Generator().manual_seed(0)
    groups, lengths = heads[0] // heads[1], (5, 40, 22)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query = random(sum(lengths), heads[0], head_dim).transpose(0, 1).reshape(heads[1], groups, -1, head_dim)
    for keys, causal in ((lengths, True), ((33,), False)):
        rows = lengths if causal else (sum(lengths),)
        segments = Segments.of(rows, keys, device, causal=causal)
        key, value = (random(sum(keys), heads[1], head_dim).transpose(0, 1) for _ in range(2))
        try:
            found = run(query, key, value, segments, head_dim**-0.5)
        except ImportError:
            return "not installed"
        except Exception as e:  # a kernel may fail in any way: the other path serves
            return f"{type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else 'no message'}"
        exact = one_by_one(query.float(), key.float(), value.float(), segments, head_dim**-0.5)
        if not all(torch.allclose(a, b, atol=2e-2) for a, b in zip(found, exact, strict=True)):
            return "its result is wrong"
    return ""


@dataclass(slots=True)
class EncodeCounts:
    """How chunks were encoded: ``padding`` are token slots that held nothing."""

    forwards: int = 0
    chunks: int = 0
    packed_forwards: int = 0
    packed_chunks: int = 0
    padding: int = 0

    def note(self, chunks: int, padding: int, *, packed: bool) -> None:
        """One forward."""
        self.forwards += 1
        self.chunks += chunks
        self.packed_forwards += packed
        self.packed_chunks += chunks if packed else 0
        self.padding += padding


class PackedPlan:
    """Chunks of ``lengths`` tokens in one row, each seeing ``context_kv [num_layers, 2, num_kv_heads, num_context,
    head_dim]`` (rotated) and itself."""

    def __init__(self, context_kv: torch.Tensor, lengths: Sequence[int], kernel: PackedKernel = ONE_BY_ONE) -> None:
        self.context_kv, self.kernel = context_kv, kernel
        device, context = context_kv.device, int(context_kv.shape[3])
        self._own = Segments.of(lengths, lengths, device, causal=True)
        self._context = Segments.of([sum(lengths)], [context], device, causal=False) if context else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :class:`~kvboost_rag.model.attention.Plan`."""
        _, heads, rows, dim = query.shape
        kv_heads = key.shape[1]
        folded = query[0].reshape(kv_heads, heads // kv_heads, rows, dim)
        out, lse = self.kernel.run(folded, key[0], value[0], self._own, scaling)
        if self._context is not None:
            keys, values = self.context_kv[layer]
            shared, shared_lse = self.kernel.run(folded, keys, values, self._context, scaling)
            # As Merge does, for two parts that always see something.
            share = torch.sigmoid(lse - shared_lse)[..., None]
            out = shared.lerp(out, share)
        return out.to(query.dtype).permute(2, 0, 1, 3).reshape(1, rows, heads, dim)
