"""Lay stored blocks at their positions of a request's cache.

::

    kv:    | held prefix | block A rotated to s_A | glue (empty) | block B rotated to s_B | question (empty) |
           0             s_A                      e_A            s_B                      e_B                n

Empty stretches are filled by the one forward that follows; nothing reads them before.
"""

from __future__ import annotations

from kvboost_rag.engine.lookup import Found
from kvboost_rag.engine.prefix import PrefixHit
from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import KVCache


def lay_prefix(cache: KVCache, hit: PrefixHit) -> None:
    """Copy the held positions ``[0, hit.num_tokens)``; keys are rotated already."""
    cache.take(hit.held.kv, hit.num_tokens)


def lay_block(cache: KVCache, found: Found, rope: RopeTable) -> None:
    """Rotate K to ``[start, end)`` and copy V, all layers in a few calls. Where the cache is paged, straight into its
    pages, those in host memory included."""
    assert found.block is not None, "a miss has nothing to lay"
    start, end = found.segment.start, found.segment.end
    with cache.lock:
        cache.extend(end)
        for a, b, target in cache.fill(start, end):
            source = found.block.kv[:, :, :, a - start : b - start]
            if source.device != target.device:
                source = source.to(target.device, non_blocking=True)
            rope.rotate_into(target[:, 0], source[:, 0], a)
            target[:, 1].copy_(source[:, 1])
        cache.length = max(cache.length, end)
