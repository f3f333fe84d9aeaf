"""Spreading: what the recomputed tokens teach about those that stay stale."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.config import NAMED_REPAIRS, Repair
from kvboost_rag.engine.spread import EDGE, FEWEST, regress
from tests.engine.helpers import DOCS, chat, make_engine, prepared

POLICY = Repair(first=EDGE, query=0.3)


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    engine = make_engine(prefix_bytes=0)
    engine.warm(DOCS)
    return engine


def test_a_shared_linear_error_is_learned() -> None:
    draw = torch.Generator().manual_seed(0)
    known, others = torch.randn(2, 400, 8, generator=draw), torch.randn(2, 50, 8, generator=draw)
    map_, shift = 0.2 * torch.randn(2, 8, 8, generator=draw), torch.randn(2, 1, 8, generator=draw)
    true = others @ map_ + shift
    weights, offset = regress(known, known @ map_ + shift)
    found = others @ weights + offset
    assert (found - true).norm() < 0.15 * true.norm()


def test_few_and_odd_probes_do_not_explode() -> None:
    draw = torch.Generator().manual_seed(0)
    known, residual = torch.randn(1, FEWEST, 64, generator=draw), torch.randn(1, FEWEST, 64, generator=draw)
    weights, offset = regress(known, residual)
    found = torch.randn(1, 100, 64, generator=draw) @ weights + offset
    assert found.norm(dim=-1).max() < 3 * residual.norm(dim=-1).max()
    weights, offset = regress(torch.zeros(1, 9, 4), torch.zeros(1, 9, 4))
    assert (torch.ones(1, 3, 4) @ weights + offset).abs().max() == 0


def test_only_stale_positions_move_and_the_first_layer_not_at_all(engine: KVBoost) -> None:
    plain, _ = prepared(engine, chat(), repair=POLICY)
    got, report = prepared(engine, chat(), repair=POLICY.with_spread())
    chosen = report.repaired_positions
    assert chosen
    stale = [p for c in got.prompt.chunks for p in range(c.start, c.end) if p not in set(chosen)]
    n = got.prompt.num_tokens
    first = (got.cache.kv[0] - plain.cache.kv[0])[:, :, :n]
    assert first[1].abs().max() < 1e-4, "layer 0 values know no context: nothing to learn"
    for layer in range(1, 4):
        moved = (got.cache.kv[layer] - plain.cache.kv[layer]).abs().amax((0, 1, 3))
        assert (moved[stale] > 0).all()


def test_spreading_forwards_no_row_more(engine: KVBoost) -> None:
    _, plain = prepared(engine, chat(), repair=POLICY)
    _, spread = prepared(engine, chat(), repair=POLICY.with_spread())
    assert spread.forwarded_tokens == plain.forwarded_tokens
    assert spread.repaired_positions == plain.repaired_positions


def test_too_few_teachers_spread_nothing(engine: KVBoost) -> None:
    policy = Repair.boundary(EDGE)  # a chunk's first tokens teach nothing
    plain, _ = prepared(engine, chat(), repair=policy)
    got, _ = prepared(engine, chat(), repair=policy.with_spread())
    assert torch.equal(got.logits, plain.logits)


def test_policies_with_and_without_are_kept_apart() -> None:
    assert POLICY.recipe != POLICY.with_spread().recipe
    assert (POLICY | Repair(spread=0.5)).spread == 0.5
    assert NAMED_REPAIRS["balanced"].cap <= 0.15
    assert NAMED_REPAIRS["faithful"].cap == 0.30
    with pytest.raises(ValueError, match="spread"):
        Repair(spread=1.5)
