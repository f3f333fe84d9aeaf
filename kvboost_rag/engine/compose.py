"""Lay stored blocks at their positions of a request's cache.

::

    kv:    | held prefix | block A rotated to s_A | glue (empty) | block B rotated to s_B | question (empty) |
           0             s_A                      e_A            s_B                      e_B                n

Empty stretches are filled by the one forward that follows; nothing reads them before.
"""

from __future__ import annotations

import torch

from kvboost_rag.engine.prefix import PrefixHit
from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import KVCache

PIECE = 32 << 20  # bytes of a block that are turned at a time: on a device, copies and fp32 take several times as much


def lay_prefix(cache: KVCache, hit: PrefixHit) -> None:
    """Copy the held positions ``[0, hit.num_tokens)``; keys are rotated already."""
    cache.take(hit.held.kv, hit.num_tokens)


def lay(cache: KVCache, start: int, end: int, kv: torch.Tensor, rope: RopeTable, layers: slice = slice(None)) -> None:
    """Rotate K of ``kv [num_layers, 2, num_kv_heads, >= end - start, head_dim]`` to ``[start, end)`` and copy V, all
    ``layers`` (those that ``kv`` has) in a few calls, no more than :data:`PIECE` bytes each (or one layer): a planned
    workspace has to hold them. Where the cache is paged, straight into its pages, those in host memory included."""
    with cache.lock:
        cache.extend(end)
        for a, b, target in cache.fill(start, end, layers):
            step = max(1, PIECE // max(1, target[0].numel() * target.element_size()))
            for i in range(0, target.shape[0], step):
                into, source = target[i : i + step], kv[i : i + step, :, :, a - start : b - start]
                if source.device != into.device:
                    # Only on a device does what reads the copy come behind it by itself; and page-locked memory may be
                    # given back while a copy that nobody waits for still reads it.
                    free = into.device.type != "cpu" and not source.is_pinned()
                    source = source.to(into.device, non_blocking=free)
                rope.rotate_into(into[:, 0], source[:, 0], a)
                into[:, 1].copy_(source[:, 1])
        cache.length = max(cache.length, end)
