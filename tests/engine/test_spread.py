"""Spreading: what the recomputed tokens teach about those that stay stale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvboost_rag import KVBoost
from kvboost_rag.config import NAMED_REPAIRS, Repair
from kvboost_rag.engine.shift import Shifter
from kvboost_rag.engine.spread import EDGE, FEWEST, Fit, Lesson, Spreader, Trust, regress
from tests.engine.helpers import DOCS, chat, make_engine, prepared
from tests.paged.helpers import pair

POLICY = Repair(first=EDGE, query=0.3)
UNSAMPLED = replace(POLICY, sample=0.0)


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    engine = make_engine(prefix_bytes=0)
    engine.warm(DOCS)
    return engine


def nowhere(n: int, chunks: int = 1) -> torch.Tensor:
    """Surroundings that tell nothing: no place, the one, all in the first chunk."""
    around = torch.zeros(n, 5 + chunks)
    around[:, 4:6] = 1
    return around


def test_a_shared_linear_error_is_learned() -> None:
    draw = torch.Generator().manual_seed(0)
    known, others = torch.randn(2, 400, 8, generator=draw), torch.randn(2, 50, 8, generator=draw)
    map_, shift = 0.2 * torch.randn(2, 8, 8, generator=draw), torch.randn(2, 1, 8, generator=draw)
    true = others @ map_ + shift
    found = regress(known, nowhere(400), known @ map_ + shift, torch.ones(400)).residual(others, nowhere(50))
    assert (found - true).norm() < 0.2 * true.norm()


def test_what_the_place_and_the_chunk_tell_is_learned() -> None:
    """Keys that know nothing; the error grows with the place, and one chunk has one of its own."""
    draw = torch.Generator().manual_seed(0)
    lesson = Lesson([(0, 100), (100, 200), (200, 300)], torch.arange(0, 300, 2), torch.ones(150))
    known, odd = lesson.surroundings(lesson.teachers), lesson.surroundings(torch.arange(1, 300, 2))

    def truth(s: torch.Tensor) -> torch.Tensor:
        return s[:, :1] * 4 + s[:, 6:7] * 2

    fit = regress(torch.randn(1, 150, 8, generator=draw), known, truth(known).expand(1, -1, 8), torch.ones(150))
    found = fit.residual(torch.randn(1, 150, 8, generator=draw), odd)
    assert (found - truth(odd)).norm() < 0.35 * truth(odd).expand(1, -1, 8).norm()
    flat = regress(torch.randn(1, 150, 8, generator=draw), nowhere(150), truth(known).expand(1, -1, 8), torch.ones(150))
    assert flat.own.norm() < 1, "keys that know nothing must not be made to know it"


def test_picked_tokens_count_for_less_than_sampled_ones() -> None:
    """Half of the teachers are of another kind; the estimate leans to the even sample's."""
    residual = torch.cat([torch.ones(1, 50, 4), -torch.ones(1, 50, 4)], 1)
    lesson = Lesson.of([(0, 200)], range(EDGE, EDGE + 100), frozenset(range(EDGE, EDGE + 50)))
    assert lesson is not None
    fit = regress(torch.zeros(1, 100, 4), nowhere(100), residual, lesson.weights)
    assert fit.residual(torch.zeros(1, 1, 4), nowhere(1)).mean() > 0.3
    even = Lesson.of([(0, 200)], range(EDGE, EDGE + 100), frozenset())
    assert even is not None
    assert (even.weights == 1).all(), "without a sample all count the same"


def test_few_and_odd_probes_do_not_explode() -> None:
    draw = torch.Generator().manual_seed(0)
    known, residual = torch.randn(1, FEWEST, 64, generator=draw), torch.randn(1, FEWEST, 64, generator=draw)
    fit = regress(known, nowhere(FEWEST), residual, torch.ones(FEWEST))
    found = fit.residual(torch.randn(1, 100, 64, generator=draw), nowhere(100))
    assert found.norm(dim=-1).max() < 3 * residual.norm(dim=-1).max()
    fit = regress(torch.zeros(1, 9, 4), nowhere(9), torch.zeros(1, 9, 4), torch.ones(9))
    assert fit.residual(torch.ones(1, 3, 4), nowhere(3)).abs().max() == 0


def test_a_token_unlike_its_teachers_is_trusted_less() -> None:
    draw = torch.Generator().manual_seed(0)
    known = torch.randn(1, 300, 8, generator=draw)
    fit = regress(known, nowhere(300), known * 0.1, torch.ones(300))
    like, unlike = torch.randn(1, 50, 8, generator=draw), 6 * torch.randn(1, 50, 8, generator=draw)
    usual = fit.leverage(known, nowhere(300)).mean(1, keepdim=True)
    trust = Trust(usual, 1.0)
    near, far = (trust.of(fit.leverage(x, nowhere(50))) for x in (like, unlike))
    assert near.max() == 1
    assert far.mean() < 0.2 * near.mean()
    assert (Trust(usual, 2.0).of(fit.leverage(unlike, nowhere(50))) < far).all()


def test_only_stale_positions_move_and_the_first_layer_not_at_all(engine: KVBoost) -> None:
    plain, _ = prepared(engine, chat(), repair=UNSAMPLED)
    got, report = prepared(engine, chat(), repair=UNSAMPLED.with_spread())
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
    for policy in (POLICY.with_spread(), UNSAMPLED.with_spread()):
        _, spread = prepared(engine, chat(), repair=policy)
        assert spread.forwarded_tokens == plain.forwarded_tokens
    assert spread.repaired_positions == plain.repaired_positions


def test_the_sample_is_even_and_a_share_of_what_the_question_would_take(engine: KVBoost) -> None:
    """With all of it sampled, every chunk gets its part, whatever the question attends to."""
    all_sampled = replace(POLICY, sample=1.0).with_spread()
    got, report = prepared(engine, chat(), repair=all_sampled)
    for c in got.prompt.chunks:
        inner = [p for p in report.repaired_positions if c.start + EDGE <= p < c.end]
        assert abs(len(inner) - 0.3 * (c.end - c.start)) <= 2 + 0.1 * (c.end - c.start)
    _, some = prepared(engine, chat(), repair=POLICY.with_spread())
    _, none = prepared(engine, chat(), repair=POLICY)
    assert some.repaired_positions != none.repaired_positions, "only where something is spread"


def test_too_few_teachers_spread_nothing(engine: KVBoost) -> None:
    policy = Repair.boundary(EDGE)  # a chunk's first tokens teach nothing
    plain, _ = prepared(engine, chat(), repair=policy)
    got, _ = prepared(engine, chat(), repair=policy.with_spread())
    assert torch.equal(got.logits, plain.logits)


def test_policies_with_and_without_are_kept_apart() -> None:
    assert POLICY.recipe != POLICY.with_spread().recipe
    assert POLICY.with_spread().recipe != UNSAMPLED.with_spread().recipe
    assert (POLICY | Repair(spread=0.5)).spread == 0.5
    sampled = replace(POLICY, sample=0.2).with_spread()
    assert (sampled | Repair.boundary(8)).sample == (Repair.boundary(8) | sampled).sample == 0.2
    assert NAMED_REPAIRS["balanced"].cap <= 0.15
    assert NAMED_REPAIRS["faithful"].cap == 0.30
    with pytest.raises(ValueError, match="spread"):
        Repair(spread=1.5)
    with pytest.raises(ValueError, match="sample"):
        Repair(sample=-0.1)


class Waits(TorchFunctionMode):
    """Notes calls for which the host waits where tensors lie on a device."""

    NAMES = ("__int__", "__index__", "__bool__", "__float__", "item", "tolist", "cpu", "nonzero", "linalg_cholesky")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        by_mask = any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in (index if type(index) is tuple else (index,))
        )
        if name in self.NAMES or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("paged", [False, True])
def test_a_long_context_is_corrected_piece_by_piece(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries of the whole context at once would be in no budget of the device's memory."""
    engine = pair(prefix_bytes=0)[0] if paged else make_engine(prefix_bytes=0)
    engine.warm(DOCS)
    whole, _ = prepared(engine, chat(), repair=POLICY.with_spread())
    largest = []

    def watched(self: Fit, vectors: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
        largest.append(vectors.nbytes)
        return residual(self, vectors, around)

    residual = Fit.residual
    monkeypatch.setattr(Fit, "residual", watched)
    monkeypatch.setattr("kvboost_rag.engine.spread.TEMPORARY", 4096)
    pieces, _ = prepared(engine, chat(), repair=POLICY.with_spread())
    assert max(largest) <= 4096
    assert (pieces.logits - whole.logits).abs().max() < 1e-4


@pytest.mark.parametrize("policy", [POLICY.with_spread(), POLICY.with_shift()])
@pytest.mark.parametrize("paged", [False, True])
def test_no_layer_waits_for_the_device(paged: bool, policy: Repair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding what stays on the host may wait, once; so the first layer is let off."""
    reviser: Any = Spreader if policy.spread else Shifter
    revise, seen = reviser.revise, []

    def watched(self: Any, cache: Any, layer: int, *rows: Any) -> None:
        with Waits() as waits:
            revise(self, cache, layer, *rows)
        seen.extend((layer, name) for name in waits.seen)

    monkeypatch.setattr(reviser, "revise", watched)
    engine = pair(prefix_bytes=0)[0] if paged else make_engine(prefix_bytes=0)
    engine.warm(DOCS)
    _, report = prepared(engine, chat(), repair=policy)
    assert report.repaired_positions
    assert [entry for entry in seen if entry[0] > 0] == []
    assert paged or seen == []
