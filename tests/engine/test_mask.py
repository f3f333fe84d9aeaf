"""The mask is exact: no row sees what stands behind it, and memory that nothing was written to yet is never read.

The first of these is the fault of released blending code, whose bottom-right-aligned causal mask lets repaired rows see
future tokens. So the tests also break the mask on purpose and must notice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.attention import RowsPlan
from kvboost_rag.model.cache import RequestCache
from tests.engine.helpers import DOCS, POLICIES, QUESTION, TOLERANCE, chat, full_prefill_gap, make_engine, prepared
from tests.tiny import tiny_model

REPAIR = Repair.boundary(6, 4)
TWINS = ("zzzz " * 12 + "x", "qqqq " * 12 + "y")  # as many tokens each, nothing in common


def future_leak(engine: KVBoost) -> float:
    """How much the KV in front of the second document moves when that document becomes another one of its length."""
    engine.warm([*DOCS, *TWINS])
    kv = []
    for twin in TWINS:
        got, report = prepared(engine, f"{DOCS[0]}\n{twin}\n{DOCS[1]}\nWhy?", repair=REPAIR)
        assert [c.outcome for c in report.chunks] == ["hit"] * 3
        assert report.repaired_tokens == 30
        kv.append(got.cache.kv[:, :, :, : got.prompt.chunks[1].start])
    assert kv[0].shape == kv[1].shape
    return float((kv[0] - kv[1]).abs().max())


def test_repaired_rows_do_not_see_the_future(family: str) -> None:
    assert future_leak(make_engine(family)) < 1e-5


def _bottom_right(self: RowsPlan, index: int, device: torch.device) -> torch.Tensor:
    """The released code's mask: row i of q sees keys up to N - q + i, whatever its position."""
    a, b, end = self.tiles[index]
    limit = torch.arange(a, b) + self.kv_length - self.num_rows
    return torch.arange(end)[None] > limit[:, None]


def _no_mask(self: RowsPlan, index: int, device: torch.device) -> torch.Tensor:
    a, b, end = self.tiles[index]
    return torch.zeros(b - a, end, dtype=torch.bool)


@pytest.mark.parametrize("leaking", [_bottom_right, _no_mask])
def test_a_leaking_mask_is_caught(monkeypatch: pytest.MonkeyPatch, leaking: Callable[..., torch.Tensor]) -> None:
    engine = make_engine()
    monkeypatch.setattr(RowsPlan, "_hidden", leaking)
    assert future_leak(engine) > 1e-2


def _off_by_one(self: RowsPlan, index: int, device: torch.device) -> torch.Tensor:
    a, b, end = self.tiles[index]
    return torch.arange(end)[None] > self.positions[a:b, None] + 1


@pytest.mark.parametrize("mask", [RowsPlan._hidden, _off_by_one])
def test_everything_recomputed_behind_an_exact_chunk_is_exact(
    monkeypatch: pytest.MonkeyPatch, mask: Callable[..., torch.Tensor]
) -> None:
    """The masked path (not the plain causal one) against a full prefill; one token too many is noticed."""
    engine = make_engine()
    prompt = chat([DOCS[0], "A document that nobody knows yet, not even the store.", DOCS[1]])
    engine.warm(DOCS, head=prompt[0]["content"])
    monkeypatch.setattr(RowsPlan, "_hidden", mask)
    gap = full_prefill_gap(engine, tiny_model(), prompt, repair=Repair(first=10_000))
    assert gap > 100 * TOLERANCE if mask is _off_by_one else gap < TOLERANCE


ROWS = ([0], [5], [0, 1, 2, 3], [0, 2, 3, 7, 9], [1, 8], list(range(3, 300, 2)), [299])


def test_rows_over_a_complete_cache_get_their_own_logits(family: str) -> None:
    """Any subset of rows, re-run over exact KV, gives exactly the full prefill's logits at those rows."""
    engine = make_engine(family)
    ids = torch.randint(10, 300, (300,))
    cache = engine.adapter.new_cache(300)
    full = engine.adapter.forward(ids, torch.arange(300), cache, keep_logits=0)
    before = cache.kv.clone()
    for rows in ROWS:
        positions = torch.tensor(rows)
        again = engine.adapter.forward(ids[positions], positions, cache, keep_logits=0)
        assert (again - full[positions]).abs().max() < TOLERANCE
        assert (cache.kv - before).abs().max() < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_was_never_written_is_never_read(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory may hold NaN; a mask that only *adds* minus infinity lets NaN through."""

    def poisoned(self: ModelAdapter, capacity: int) -> RequestCache:
        s = self.spec
        return RequestCache(torch.full((s.num_layers, 2, s.num_kv_heads, capacity, s.head_dim), torch.nan))

    engine = make_engine()
    engine.warm(DOCS[:2])
    prompt = chat([DOCS[0], DOCS[3], DOCS[1]])  # a miss in the middle
    clean, _ = prepared(engine, prompt, chunks=[DOCS[3]], repair=POLICIES[policy])
    monkeypatch.setattr(ModelAdapter, "new_cache", poisoned)
    dirty, _ = prepared(engine, prompt, chunks=[DOCS[3]], repair=POLICIES[policy])
    n = clean.prompt.num_tokens
    assert torch.equal(dirty.logits, clean.logits)
    assert torch.equal(dirty.cache.kv[:, :, :, :n], clean.cache.kv[:, :, :, :n])


def test_the_question_is_the_whole_last_stretch(family: str) -> None:
    """Released code took ``len([ids])``, always 1, for the question's length."""
    engine = make_engine(family)
    engine.warm(DOCS)
    got, report = prepared(engine, chat(), repair=Repair.attention(0.1))
    assert got.prompt.segments[-1].text.startswith(QUESTION)
    assert report.scoring_tokens == len(got.prompt.segments[-1])
