"""Blocks of slow tiers are used layer by layer as they come in: the same answers, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import CancelToken, KVBoost, Repair
from kvboost_rag.engine import arrivals as arrivals_module
from kvboost_rag.engine import report as report_module
from kvboost_rag.engine.arrivals import LOADERS, Arrivals
from kvboost_rag.engine.report import Report
from kvboost_rag.errors import BlockFormatError, StoreError, UsageError
from kvboost_rag.store import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvboost_rag.store.remote_link import Link, Unavailable
from tests.engine.helpers import DOCS, POLICIES, SYSTEM, chat, make_engine, prepared, spy
from tests.engine.slow_store import PATIENCE_S, Gate, SlowStore
from tests.engine.test_cost import outcomes, set_costs
from tests.paged.helpers import least_budget
from tests.store.test_arriving import Broken
from tests.store.test_remote import Shelf
from tests.streaming.helpers import budget_for, streamed_engine
from tests.tiny import LAYERS, save_tiny, tiny_model

LONG = tuple(f"{text} {other}" for text, other in zip(DOCS, DOCS[1:] + DOCS[:1], strict=True))

# Corrects what was laid in the very forward that may be cut: no scoring pass comes before it.
RECIPES = {**POLICIES, "shifted at once": Repair.boundary(4).with_shift()}


@pytest.fixture(autouse=True)
def _no_loader_is_left() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvboost-load")]


def told(report: Report) -> dict[str, Any]:
    """A report without what depends on time."""
    return {k: v for k, v in report.as_dict().items() if k not in ("stages", "ttft_s", "total_s")}


def both(folder: Path, *, family: str = "llama", model: Any = None, **options: Any) -> tuple[KVBoost, KVBoost]:
    """(waiting, overlapped) over one folder without a memory tier."""
    options = {"memory_bytes": 0, "prefix_bytes": 0, "on_low_fidelity": "ignore", **options}
    engines = [make_engine(family, model=model, store=folder, overlap=way, **options) for way in (False, "auto")]
    engines[0].warm(LONG)
    assert engines[1].engine.prefiller.finder.overlap
    return engines[0], engines[1]


def slow(before: Any = None, **options: Any) -> tuple[KVBoost, SlowStore]:
    store = SlowStore(before) if before else SlowStore()
    options = {"prefix_bytes": 0, "on_low_fidelity": "ignore", "store": store, **options}
    engine = make_engine(**options)
    engine.warm(LONG)
    return engine, store


def assert_same(waiting: KVBoost, overlapped: KVBoost, prompt: Any, **options: Any) -> None:
    want, expected = prepared(waiting, prompt, **options)
    got, report = prepared(overlapped, prompt, **options)
    assert "wait" not in expected.stages
    assert "wait" in report.stages
    assert told(report) == told(expected)
    assert torch.equal(got.logits, want.logits)
    n = got.prompt.num_tokens
    if hasattr(got.cache, "kv"):
        assert torch.equal(got.cache.kv[:, :, :, :n], want.cache.kv[:, :, :, :n])


# --- overlapped = waiting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_give_the_same_bits(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    waiting, overlapped = both(tmp_path, model=tiny_model(family, dtype=dtype))
    for policy in ("fast", "balanced", "faithful"):
        assert_same(waiting, overlapped, chat([LONG[2], LONG[0], LONG[3]]), repair=policy)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_policies_and_compressions_give_the_same_bits(policy: str, compression: str, tmp_path: Path) -> None:
    waiting, overlapped = both(tmp_path, compression=compression)
    assert_same(waiting, overlapped, chat(LONG), repair=POLICIES[policy])


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_cut_off_repeated_own_head_and_missed_chunks_give_the_same_bits(policy: str, tmp_path: Path) -> None:
    waiting, overlapped = both(tmp_path)
    waiting.warm(LONG[:1], head=SYSTEM)
    text = LONG[1][: len(LONG[1]) * 2 // 3]
    for docs in ([LONG[0], LONG[1], LONG[0]], [LONG[0], text], ["Nobody knows this one yet, it is new.", LONG[2]]):
        assert_same(waiting, overlapped, chat(docs, question=""), repair=policy)
        assert_same(waiting, overlapped, chat(docs), repair=policy, chunks=docs)


@pytest.mark.parametrize("policy", ["fast", "balanced", "deviation"])
def test_pages_that_spill_give_the_same_bits(policy: str, tmp_path: Path) -> None:
    budget = least_budget(make_engine())
    waiting, overlapped = both(tmp_path, kv_vram=budget)
    assert_same(waiting, overlapped, chat(LONG), repair=POLICIES[policy])
    assert overlapped.generate(chat(LONG), max_new_tokens=8).token_ids == (
        waiting.generate(chat(LONG), max_new_tokens=8).token_ids
    )


def test_sliced_forwards_give_the_same_bits(tmp_path: Path) -> None:
    waiting, overlapped = both(tmp_path)
    for engine in (waiting, overlapped):
        engine.adapter.max_rows = 16
    assert_same(waiting, overlapped, chat([LONG[0], "A chunk that is not stored: " * 4, LONG[1]]), repair="fast")


def test_a_held_prefix_in_front_gives_the_same_bits(tmp_path: Path) -> None:
    waiting, overlapped = both(tmp_path, prefix_bytes=1 << 28)
    for engine in (waiting, overlapped):
        engine.generate(chat(LONG[:1]), max_new_tokens=2)
    assert_same(waiting, overlapped, chat(LONG[:3]))


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_model_gives_the_same_bits(smollm2: Any, tmp_path: Path) -> None:
    texts = [" ".join(LONG[i:] + LONG[:i]) for i in range(4)]
    options = {"store": tmp_path, "memory_bytes": 0, "prefix_bytes": 0, "on_low_fidelity": "ignore"}
    waiting = KVBoost(smollm2.model, smollm2.tokenizer, overlap=False, **options)
    waiting.warm(texts)
    for policy in ("fast", "balanced"):
        assert_same(waiting, KVBoost(smollm2.model, smollm2.tokenizer, **options), chat(texts[::-1]), repair=policy)


# --- it does overlap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_a_layer_runs_before_the_next_one_has_come(policy: str) -> None:
    """Layer l + 1 is let through by the end of layer l: a forward that waited for all of it would never begin."""
    gate = Gate(open_below=1)
    engine, store = slow(gate)
    want = prepared(make_engine_like(engine), chat(LONG), repair=policy)[0]
    ran: list[int] = []

    def let_next(index: int) -> Any:
        def hook(*args: object) -> None:
            ran.append(index)
            if len(ran) < LAYERS:  # the first consumer: the scoring pass, or the forward
                assert max(layer for layer, _ in store.read) == index, "nothing further was read"
            gate.let(index + 2)

        return hook

    layers = engine.adapter.model.model.layers
    handles = [layer.register_forward_hook(let_next(i)) for i, layer in enumerate(layers[:-1])]
    try:
        got, report = prepared(engine, chat(LONG), repair=policy)
    finally:
        for handle in handles:
            handle.remove()
    assert ran[: LAYERS - 1] == list(range(LAYERS - 1))
    assert torch.equal(got.logits, want.logits)
    assert report.hits == 4


def make_engine_like(engine: KVBoost) -> KVBoost:
    """Over the same blocks, all of them in memory."""
    plain = make_engine(prefix_bytes=0, on_low_fidelity="ignore")
    plain.warm(LONG)
    return plain


def test_layers_are_read_in_order_over_all_blocks() -> None:
    begun: list[int] = []
    engine, store = slow(lambda key, layer: begun.append(layer))
    docs = [*LONG, *(f"{text} And more." for text in LONG)]
    engine.warm(docs)
    prepared(engine, chat(docs))
    assert sorted(begun) == sorted(list(range(LAYERS)) * 8)
    for i, layer in enumerate(begun):  # a loader may be slow, but holds up no more than what it took
        assert sum(later < layer for later in begun[i:]) < LOADERS
    assert len(set(store.whole)) == len(store.whole) == 8
    assert store.left == []


def test_reading_begins_before_anything_else_of_the_request_is_done() -> None:
    begun = threading.Event()
    engine, _ = slow(lambda key, layer: begun.set())
    new_cache = engine.adapter.new_cache

    def late(capacity: int) -> Any:
        assert begun.wait(PATIENCE_S)
        return new_cache(capacity)

    engine.adapter.new_cache = late  # type: ignore[method-assign]
    assert prepared(engine, chat(LONG))[1].hits == 4


def test_until_its_first_layer_has_come_a_request_does_not_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked, lay = Gate(), threading.Event(), Arrivals.lay

    def asking(*args: Any) -> None:
        asked.set()
        lay(*args)

    monkeypatch.setattr(Arrivals, "lay", asking)
    engine, _ = slow(gate)
    hits: list[int] = []
    waiting = threading.Thread(target=lambda: hits.append(engine.generate(chat(LONG), max_new_tokens=1).report.hits))
    waiting.start()
    assert asked.wait(PATIENCE_S)
    assert engine.generate("Something else, without documents.", max_new_tokens=3).report.new_tokens
    assert hits == []
    gate.let(LAYERS)
    waiting.join(PATIENCE_S)
    assert hits == [4]


def test_blocks_in_memory_are_laid_at_once_and_nothing_is_waited_for() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    _, report = prepared(engine, chat())
    assert report.hits == 4
    assert "wait" not in report.stages


def test_no_second_is_counted_in_two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves only while layers are laid, which happens inside the forward."""
    now, lay = [0.0], arrivals_module.lay

    def slowly(*args: Any) -> None:
        now[0] += 1.0
        lay(*args)

    monkeypatch.setattr(arrivals_module, "lay", slowly)
    monkeypatch.setattr(report_module, "perf_counter", lambda: now[0])
    gate = Gate(open_below=1)
    engine, _ = slow(gate)
    handle = engine.adapter.model.model.layers[0].register_forward_hook(lambda *args: gate.let(LAYERS))
    _, report = prepared(engine, chat(LONG), repair="balanced")
    handle.remove()
    assert now[0] >= 8, "the first layers of four blocks before the forward, the others inside it"
    assert report.stages["compose"] == sum(report.stages.values()) == now[0]
    assert {"lookup", "wait", "score", "forward"} <= set(report.stages)


def test_only_auto_or_false() -> None:
    for value in (True, "on", None, 1):
        with pytest.raises(UsageError, match="overlap"):
            make_engine(overlap=value)


# --- blocks that are lost on their way ------------------------------------------------------------------------------


def damage(store: DiskStore, key: str, layer: int) -> None:
    path = store.files.path(key)
    assert path is not None
    data = bytearray(path.read_bytes())
    block = store.get(key)
    layer_bytes = block.nbytes // LAYERS  # type: ignore[union-attr]
    data[len(data) - (LAYERS - layer) * layer_bytes + layer_bytes // 2] ^= 0x41
    path.write_bytes(data)


@pytest.mark.parametrize("policy", ["fast", "balanced", "shifted"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_damage_in_any_layer_is_a_miss(policy: str, layer: int, tmp_path: Path) -> None:
    reports, logits = [], []
    for way in (False, "auto"):
        folder = tmp_path / str(way)
        engine = make_engine(store=folder, memory_bytes=0, prefix_bytes=0, overlap=way)
        engine.warm(LONG)
        key = engine.encoder().key(engine.encoder().tokenize(LONG[1]))
        store = engine.store
        assert isinstance(store, DiskStore)
        damage(store, key, layer)
        got, report = prepared(engine, chat(LONG), repair=POLICIES[policy])
        reports.append(report)
        logits.append(got.logits)
        assert [c.outcome for c in report.chunks] == ["hit", "miss", "hit", "hit"]
        assert f"layer {layer}" in report.chunks[1].reason
        assert list(store.files.quarantine.iterdir())
        stats = store.stats()
        assert (stats.misses["damaged"], stats.hits) == (1, 1 + 3), "one get of ours, and three blocks"
        assert engine.generate(chat(LONG), max_new_tokens=1).report.stored_tokens == len(got.missed[0])
        assert store.check() == []
    waiting, overlapped = reports
    assert torch.equal(*logits)
    assert overlapped.forwarded_tokens == waiting.forwarded_tokens + overlapped.vain_tokens
    assert bool(overlapped.vain_tokens) == any("lost on its way" in w for w in overlapped.warnings)
    for name in ("reused_tokens", "repaired_tokens", "exact", "scoring_tokens"):
        assert getattr(overlapped, name) == getattr(waiting, name)
    assert [c.reason for c in overlapped.chunks] == [c.reason for c in waiting.chunks]


@pytest.mark.parametrize("policy", ["fast", "balanced", "shifted at once"])
@pytest.mark.parametrize("layer", range(1, LAYERS))
@pytest.mark.parametrize(
    ("error", "reason"), [(BlockFormatError("torn"), "damaged: torn"), (Unavailable("gone"), "unavailable: gone")]
)
def test_rows_that_ran_in_vain_are_counted(error: Exception, reason: str, layer: int, policy: str) -> None:
    """The block is lost when the layers before have run, for certain."""
    gate, engine_and_victim = Gate(open_below=layer), []

    def before(key: str, at: int) -> None:
        engine, victim = engine_and_victim
        if key == victim and at == layer:
            gate(key, layer)
            engine.store.delete(victim)
            raise error
        if at > layer:
            gate(key, at)

    engine, store = slow(before)
    victim = engine.encoder().key(engine.encoder().tokenize(LONG[2]))
    engine_and_victim += [engine, victim]
    handle = engine.adapter.model.model.layers[layer - 1].register_forward_hook(lambda *args: gate.let(LAYERS))
    with spy(engine) as rows:
        got, report = prepared(engine, chat(LONG), repair=RECIPES[policy])
    handle.remove()
    assert [c.outcome for c in report.chunks] == ["hit", "hit", "miss", "hit"]
    assert report.chunks[2].reason == reason
    assert report.forwarded_tokens == pytest.approx(rows.total)
    assert 0 < report.vain_tokens < report.forwarded_tokens
    assert any(reason in w for w in report.warnings)

    plain = make_engine_like(engine)
    plain.store.delete(victim)
    want, expected = prepared(plain, chat(LONG), repair=RECIPES[policy])
    assert torch.equal(got.logits, want.logits)
    assert report.forwarded_tokens - report.vain_tokens == pytest.approx(expected.forwarded_tokens)
    assert report.scoring_tokens == expected.scoring_tokens


def test_a_lost_block_is_taken_from_the_next_tier(tmp_path: Path) -> None:
    """As a look-up that waits does."""
    near, far = DiskStore(tmp_path / "near"), DiskStore(tmp_path / "far")
    engine = make_engine(store=TieredStore([near, far]), prefix_bytes=0)
    engine.warm(LONG)
    key = engine.encoder().key(engine.encoder().tokenize(LONG[1]))
    damage(near, key, LAYERS - 1)
    want = prepared(make_engine_like(engine), chat(LONG))[0]
    got, report = prepared(engine, chat(LONG))
    assert report.hits == 4
    assert torch.equal(got.logits, want.logits)
    assert near.contains(key)
    assert near.check() == []


def test_an_own_head_block_that_is_lost_gives_way_to_the_canonical_one() -> None:
    lost: list[str] = []

    def before(key: str, layer: int) -> None:
        if key in lost and layer == 2:
            raise BlockFormatError("torn")

    engine, store = slow(before)
    before_head = set(store.keys())
    engine.warm(LONG[:1], head=SYSTEM)
    _, report = prepared(engine, chat(LONG[:1]), repair="fast")
    assert report.exact
    lost += set(store.keys()) - before_head
    assert len(lost) == 1
    _, report = prepared(engine, chat(LONG[:1]), repair="fast")
    assert [(c.outcome, c.reason) for c in report.chunks] == [("hit", "canonical block")]
    assert not report.exact


def test_all_blocks_may_be_lost() -> None:
    def before(key: str, layer: int) -> None:
        if layer == 1:
            raise Unavailable("gone")

    engine, _ = slow(before)
    result = engine.generate(chat(LONG), max_new_tokens=2)
    assert [c.reason for c in result.report.chunks] == ["unavailable: gone"] * 4
    assert result.report.exact


@pytest.mark.parametrize("policy", ["fast", "balanced"])
@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_server_that_goes_away_midway_is_a_miss(how: str, policy: str) -> None:
    shelf, stuck = Shelf(), threading.Event()
    shelf.max_value_bytes = 1 << 30
    link = Link(30.0 if how == "dies" else 3.0, attempts=1)
    engine = make_engine(store=RemoteStore(shelf, link=link), prefix_bytes=0, on_low_fidelity="ignore")
    engine.warm(LONG)
    shelf.piece = max(map(len, shelf.values.values())) // 2  # header and the first layer
    Broken(shelf, 8, ConnectionError("reset") if how == "dies" else stuck)
    got, report = prepared(engine, chat(LONG), repair=policy)
    stuck.set()
    assert {c.outcome for c in report.chunks} == {"miss"}
    assert all(c.reason.startswith("unavailable") for c in report.chunks)
    assert report.exact
    plain = make_engine_like(engine)
    plain.store.clear()
    want = prepared(plain, chat(LONG), repair=policy, chunks=LONG)[0]
    assert torch.equal(got.logits, want.logits)
    engine.close()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_streamed_model_is_cut_and_goes_on(layer: int, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model")
    store = SlowStore()
    engine = streamed_engine(path, budget_for(path, 1), store=store, prefix_bytes=0, on_low_fidelity="ignore")
    engine.warm(LONG[:2])
    victim = engine.encoder().key(engine.encoder().tokenize(LONG[1]))

    def before(key: str, at: int) -> None:
        if key == victim and at == layer:
            store.delete(victim)
            raise BlockFormatError("torn")

    store.before = before
    got, report = prepared(engine, chat(LONG[:2], question="?"), repair="fast")
    assert [c.outcome for c in report.chunks] == ["hit", "miss"]
    again, _ = prepared(engine, chat(LONG[:2], question="?"), repair="fast")
    assert torch.equal(got.logits, again.logits)


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_a_store_that_breaks_is_an_error_of_ours(policy: str) -> None:
    def before(key: str, layer: int) -> None:
        if layer == 2:
            raise ZeroDivisionError("a bug")

    engine, store = slow(before)
    with pytest.raises(StoreError, match="a bug") as caught:
        engine.generate(chat(LONG), repair=policy)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(store.left) == 4
    store.before = lambda key, layer: None
    assert engine.generate(chat(LONG), max_new_tokens=1).report.hits == 4, "and no lock is held"


def test_a_tier_that_breaks_when_it_takes_a_block_is_an_error_of_ours(tmp_path: Path) -> None:
    near, far = MemoryStore(), DiskStore(tmp_path)
    engine = make_engine(store=TieredStore([near, far]), prefix_bytes=0)
    engine.warm(LONG)
    near.clear()
    near.put = _break  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="a bug"):
        engine.generate(chat(LONG))


def _break(block: object) -> bool:
    raise ZeroDivisionError("a bug")


# --- cancelled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_a_cancelled_request_lets_go(policy: str) -> None:
    cancel, left = CancelToken(), threading.Event()

    def before(key: str, layer: int) -> None:
        if layer == 2:
            cancel.cancel()
            left.wait(PATIENCE_S)
            raise Unavailable("left")

    engine, store = slow(before)
    store.left = _Telling(left)
    result = engine.generate(chat(LONG), repair=policy, cancel=cancel)
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    assert result.report.forwarded_tokens < result.report.prompt_tokens, "none, where loaders were ahead of the forward"
    assert left.is_set(), "who read was told"
    assert store.whole == []
    store.before = lambda key, layer: None
    done: list[int] = []
    other = threading.Thread(target=lambda: done.append(engine.generate(chat(LONG), max_new_tokens=1).report.hits))
    other.start()
    other.join(PATIENCE_S)
    assert done == [4], "another thread gets the model's lock"


class _Telling(list[str]):
    """Sets an event when something is noted: a source that waits ends when it is abandoned."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def append(self, item: str) -> None:
        super().append(item)
        self.event.set()


# --- what the tiers count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_block_counts_once_and_moves_up(compression: str, tmp_path: Path) -> None:
    near, far = MemoryStore(), DiskStore(tmp_path, compression=compression)
    engine = make_engine(store=TieredStore([near, far]), prefix_bytes=0)
    engine.warm(LONG)
    near.clear()
    first, report = prepared(engine, chat(LONG))
    assert "wait" in report.stages
    stats = engine.store.stats()
    assert [(s.hits, sum(s.read_counts)) for s in (stats, *stats.tiers)] == [(4, 4), (0, 0), (4, 4)]
    assert stats.read_bytes == stats.tiers[1].read_bytes == sum(far.get(k).nbytes for k in far.keys())  # type: ignore[union-attr]
    assert stats.tiers[1].read_s > 0
    assert stats.tiers[0].blocks == 4
    again, report = prepared(engine, chat(LONG))
    assert "wait" not in report.stages
    assert torch.equal(again.logits, first.logits)
    stats = engine.store.stats()
    assert [s.hits for s in (stats, *stats.tiers)][:2] == [8, 4]


@pytest.mark.parametrize("overlap", ["auto", False])
def test_what_is_read_meanwhile_is_not_added_to_the_forward(overlap: Any) -> None:
    """Loading takes 0.9 s, any forward 1 s: one after the other that is more than recomputing, side by side it is not."""
    engine, _ = slow(cost_model=True, overlap=overlap)
    set_costs(engine, forward=1.0, load=0.9)
    assert outcomes(engine, chat(LONG))[0][0] == ("hit" if overlap else "miss")
    set_costs(engine, forward=1.0, load=1.2)
    assert outcomes(engine, chat(LONG))[0][0] == "miss"


def test_the_cost_model_learns_how_long_blocks_took_to_come(tmp_path: Path) -> None:
    engine, _ = slow(cost_model=True)
    costs = engine.engine.costs
    assert costs is not None
    seen: list[float] = []
    observe = costs.observe
    costs.observe = lambda *args: (seen.append(args[-1]), observe(*args))[1]  # type: ignore[method-assign]
    report = engine.generate(chat(LONG), max_new_tokens=1).report
    assert 0 < seen[0] <= report.ttft_s
