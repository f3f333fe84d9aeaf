"""Engines whose KV does not fit the device, and what they are compared with."""

from __future__ import annotations

from typing import Any

from kvboost_rag import KVBoost
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import KVBudget, page_sizes
from tests.engine.helpers import DOCS, make_engine

PAGE = 8


def least_budget(engine: KVBoost, page_tokens: int = PAGE, **more: Any) -> KVBudget:
    """The smallest budget that works for the engine's model: two pages, and the buffers that they move through."""
    spec = engine.adapter.spec
    page = page_tokens * spec.bytes_per_token
    budget = KVBudget(4 * page + 2 * page // spec.num_layers, page_tokens, **more)
    assert page_sizes(budget, spec.bytes_per_token, spec.num_layers).pages == 2
    return budget


def pair(
    family: str = "llama", *, order: Any = "random", backend: Any = None, budget: Any = None, **options: Any
) -> tuple[KVBoost, KVBoost]:
    """(paged, unlimited): the same model and store contents; ``budget``: a function of the unlimited engine."""
    unlimited = make_engine(family, **options)
    paged = make_engine(
        family,
        kv_vram=(budget or least_budget)(unlimited),
        kv_backend=backend or VirtualBackend(order=order),
        **options,
    )
    for engine in (paged, unlimited):
        engine.engine.eos_ids = frozenset()
        engine.warm(DOCS)
    return paged, unlimited


def stats(engine: KVBoost) -> dict[str, Any]:
    found = engine.stats()["paged"]
    assert isinstance(found, dict)
    return found


def times_budget(engine: KVBoost, tokens: int) -> float:
    """KV of ``tokens`` positions, in units of the device budget."""
    assert engine.adapter.pages is not None
    return tokens * engine.adapter.spec.bytes_per_token / engine.adapter.pages.budget.nbytes


def dense(engine: KVBoost, cache: Any, length: int) -> Any:
    """A copy of ``[num_layers, 2, num_kv_heads, length, head_dim]``, wherever it lies."""
    buffer = engine.adapter.new_buffer(length)
    buffer.take(cache.held(), length)
    return buffer.kv
