"""Any sequence of operations on caches that share one pool leaves what the same operations leave on plain tensors."""

from __future__ import annotations

from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.model.cache import KVCache, RequestCache
from kvboost_rag.model.paged.cache import PagedCache
from kvboost_rag.model.paged.pool import PagePool
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import KVBudget

LAYERS, KV_HEADS, GROUPS, DIM, MOST = 3, 2, 2, 16, 90
SPEC: Any = SimpleNamespace(
    num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=torch.device("cpu"),
    bytes_per_token=LAYERS * 2 * KV_HEADS * DIM * 4,
)  # fmt: skip


def pool_of(page_tokens: int, pages: int, order: Any, seed: int) -> PagePool:
    page = page_tokens * SPEC.bytes_per_token
    budget = KVBudget((pages + 2) * page + 2 * page // LAYERS, page_tokens)
    return PagePool(SPEC, budget, VirtualBackend(order=order, seed=seed), RLock())


class Twin:
    """A paged cache, and the buffer that it must equal; whatever was never written is not compared."""

    def __init__(self, pool: PagePool, generator: torch.Generator) -> None:
        self.paged: PagedCache = pool.new_cache(MOST)
        self.plain = RequestCache(torch.zeros(LAYERS, 2, KV_HEADS, MOST, DIM))
        self.written = torch.zeros(MOST, dtype=torch.bool)
        self.generator = generator

    @property
    def both(self) -> tuple[KVCache, KVCache]:
        return self.paged, self.plain

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def forward(self, positions: list[int]) -> None:
        """Rows through all layers: written, then attended to, where all before them is there."""
        rows = torch.tensor(positions)
        for cache in self.both:
            cache.extend(positions[-1] + 1)
            cache.at(rows)
        self.written[rows] = True
        complete = bool(self.written[: positions[-1] + 1].all())
        plans = [cache.plan(rows) for cache in self.both]
        for layer in range(LAYERS):
            kv, query = (
                self.random(2, 1, KV_HEADS, len(positions), DIM),
                self.random(1, KV_HEADS * GROUPS, len(positions), DIM),
            )
            found = [c.update(kv[0], kv[1], layer) for c in self.both]  # type: ignore[attr-defined]
            if complete:
                out = [p.attend(layer, query, k, v, 0.3) for p, (k, v) in zip(plans, found, strict=True)]
                assert torch.allclose(out[0], out[1], atol=1e-5)

    def lay(self, start: int, length: int) -> None:
        block = self.random(LAYERS, 2, KV_HEADS, length, DIM)
        for cache in self.both:
            cache.extend(start + length)
            for a, b, target in cache.fill(start, start + length):
                target.copy_(block[:, :, :, a - start : b - start])
            cache.length = max(cache.length, start + length)
        self.written[start : start + length] = True

    def correct(self, start: int, length: int) -> None:
        """What revisers do: add to one layer's stretch, in place."""
        layer, end = start % LAYERS, min(start + length, self.plain.length)
        for cache in self.both:
            for a, b, keys, values in cache.layer_stretches(layer, start, end, write=True):
                keys.add_(torch.arange(a, b)[:, None])
                values.sub_(torch.arange(a, b)[:, None])

    def clear(self, positions: list[int]) -> None:
        for cache in self.both:
            cache.extend(positions[-1] + 1)
            cache.length = max(cache.length, positions[-1] + 1)
            cache.clear(torch.tensor(positions))
        self.written[positions] = True

    def crop(self, count: int) -> None:
        for cache in self.both:
            cache.crop(-count)
        self.written[self.plain.length :] = False

    def take(self, other: Twin, length: int) -> None:
        for cache, source in zip(self.both, other.both, strict=True):
            cache.take(source.held(), length)
        self.written[:length] = other.written[:length]

    def check(self) -> None:
        n = self.plain.length
        assert self.paged.length == n
        at = self.written[:n].nonzero().flatten()
        if not at.numel():
            return
        for layer in range(LAYERS):
            for ours, theirs in zip(self.paged.gather(layer, at), self.plain.gather(layer, at), strict=True):
                assert torch.equal(ours, theirs)
        got = torch.zeros(LAYERS, 2, KV_HEADS, n, DIM)
        for a, b, view in self.paged.read(0, n):
            got[:, :, :, a:b] = view
        assert torch.equal(got[:, :, :, at], self.plain.kv[:, :, :, at])


positions = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=40, unique=True).map(sorted)
operation = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("append"), st.just(1)),
    st.tuples(st.just("forward"), positions),
    st.tuples(st.just("lay"), st.integers(0, MOST - 1), st.integers(1, 40)),
    st.tuples(st.just("correct"), st.integers(0, MOST - 1), st.integers(1, 60)),
    st.tuples(st.just("clear"), positions),
    st.tuples(st.just("crop"), st.integers(0, MOST)),
    st.tuples(st.just("take"), st.integers(1, MOST)),
    st.tuples(st.just("check")),
    st.tuples(st.just("drop")),
)


def perform(twins: list[Twin], which: int, step: tuple[Any, ...], pool: PagePool) -> None:
    twin, other = twins[which], twins[1 - which]
    name, n = step[0], twin.plain.length
    if name == "append" and n < MOST:
        twin.forward(list(range(n, min(MOST, n + step[1]))))
    elif name == "forward":
        twin.forward(step[1])
    elif name == "lay":
        twin.lay(step[1], min(step[2], MOST - step[1]))
    elif name == "correct" and step[1] < n:
        twin.correct(step[1], step[2])
    elif name == "check":  # not after every step: looking at pages settles what is on its way
        twin.check()
    elif name == "clear":
        twin.clear(step[1])
    elif name == "crop":
        twin.crop(min(step[1], n))
    elif name == "take" and other.plain.length:
        twin.take(other, min(step[1], other.plain.length))
    elif name == "drop":
        twins[which] = Twin(pool, twin.generator)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 1), operation), min_size=1, max_size=25),
    page_tokens=st.integers(1, 12),
    pages=st.integers(2, 8),
    order=st.sampled_from(["late", "early", "random"]),
    seed=st.integers(0, 3),
)
def test_any_operations(steps: list[Any], page_tokens: int, pages: int, order: str, seed: int) -> None:
    pool = pool_of(page_tokens, pages, order, seed)
    generator = torch.Generator().manual_seed(seed)
    twins = [Twin(pool, generator), Twin(pool, generator)]
    for which, step in steps:
        perform(twins, which, step, pool)
        for twin in twins:
            table = twin.paged.table
            assert len(table.slots) <= pool.sizes.pages - 1, "one page is always left for whoever comes next"
            assert table.num_pages * page_tokens >= twin.plain.length
    for twin in twins:
        twin.check()
    slots = [s for t in twins for s in t.paged.table.slots]
    assert len(set(slots)) == len(slots), "no page belongs to two requests"
    del twins, twin, table
    found = pool.snapshot()
    assert found.free_pages == found.pages
