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
from kvboost_rag.model.cache import RequestCache


def lay_prefix(cache: RequestCache, hit: PrefixHit) -> None:
    """Copy the held positions ``[0, hit.num_tokens)``; keys are rotated already."""
    n = hit.num_tokens
    cache.kv[:, :, :, :n].copy_(hit.held.kv[:, :, :, :n])
    cache.length = max(cache.length, n)


def lay_block(cache: RequestCache, found: Found, rope: RopeTable) -> None:
    """Rotate K to ``[start, end)`` and copy V, all layers in a few calls."""
    assert found.block is not None, "a miss has nothing to lay"
    segment = found.segment
    n, start, end = len(segment), segment.start, segment.end
    source = found.block.kv
    if source.device != cache.kv.device:
        source = source.to(cache.kv.device, non_blocking=True)
    target = cache.kv[:, :, :, start:end]
    rope.rotate_into(target[:, 0], source[:, 0, :, :n], start)
    target[:, 1].copy_(source[:, 1, :, :n])
    cache.length = max(cache.length, end)
