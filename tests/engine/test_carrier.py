"""Blocks in host memory cross to the device while the forward runs: the same bits as laid before it, in every legal
order of copies; what is left out is found."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvboost_rag import CancelToken, KVBoost, Repair
from kvboost_rag.engine import carriage as carriage_module
from kvboost_rag.engine import carrier as carrier_module
from kvboost_rag.engine.carriage import Carriage
from kvboost_rag.engine.carrier import device_bytes
from kvboost_rag.engine.report import Report
from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.model.streaming.ring import Ring
from kvboost_rag.model.streaming.virtual import RaceError, VirtualBackend
from kvboost_rag.plan import Budget, KVBudget
from kvboost_rag.store import MemoryStore, Miss
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.remote_link import Unavailable
from tests.engine.helpers import DOCS, POLICIES, SYSTEM, chat, make_engine, prepared
from tests.engine.slow_store import SlowStore
from tests.engine.test_overlap import LONG, told
from tests.paged.helpers import PAGE, dense, least_budget
from tests.paged.test_races import forgetful
from tests.paged.test_streamed import everything
from tests.streaming.helpers import budget_for, streamed_engine
from tests.tiny import LAYERS, save_tiny, tiny_model

ORDERS = ["late", "early", "random"]
QUIET: dict[str, Any] = {"prefix_bytes": 0, "on_low_fidelity": "ignore"}


def both(backend: VirtualBackend | None = None, family: str = "llama", **options: Any) -> tuple[KVBoost, KVBoost]:
    """(laid before the forward, carried while it runs) over blocks in the memory of each."""
    backend = backend or VirtualBackend(order="random")
    engines = [make_engine(family, kv_backend=backend, carry=way, **QUIET, **options) for way in (False, "auto")]
    for engine in engines:
        engine.warm(LONG)
    assert engines[0].engine.carrier is None
    return engines[0], engines[1]


def carried(engine: KVBoost) -> dict[str, int]:
    found = engine.stats()["carrier"]
    assert isinstance(found, dict)
    return found


def assert_same(plain: KVBoost, ours: KVBoost, prompt: Any, *, carries: bool = True, **options: Any) -> Report:
    """The same logits, KV and report, bit for bit, and something was carried."""
    before = carried(ours)["bytes_carried"]
    want, expected = prepared(plain, prompt, **options)
    got, report = prepared(ours, prompt, **options)
    assert torch.equal(got.logits, want.logits)
    assert told(report) == told(expected)
    n = got.prompt.num_tokens
    if hasattr(got.cache, "kv"):
        assert torch.equal(got.cache.kv[:, :, :, :n], want.cache.kv[:, :, :, :n])
    assert (carried(ours)["bytes_carried"] > before) == (carries and report.hits > 0)
    assert got.cache.arriving is None
    return report


@pytest.fixture(params=["one piece a layer", "a block a piece"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Buffers that hold everything, or hardly one block."""
    most = carriage_module.PIECE
    if request.param == "a block a piece":
        block = make_engine().encoder().encode([tuple(range(10, 10 + max(len(text) for text in LONG)))])[0]
        most = block.nbytes // LAYERS
    for module in (carriage_module, carrier_module):
        monkeypatch.setattr(module, "PIECE", most)
    monkeypatch.setattr("kvboost_rag.model.streaming.ring.ROUND", 64)
    return most


# --- carried = laid before --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_copies(order: Any, seed: int, pieces: int) -> None:
    backend = VirtualBackend(order=order, seed=seed)
    plain, ours = both(backend)
    for repair in ("fast", "balanced", "faithful", Repair.full()):
        assert_same(plain, ours, chat(LONG), repair=repair)
    answers = [e.generate(chat(LONG[::-1]), max_new_tokens=8).token_ids for e in (plain, ours)]
    assert answers[0] == answers[1]
    found = carried(ours)
    assert found["bytes_carried"] > 0
    assert found["page_locked_bytes"] > 0
    assert found["slot_bytes"] <= pieces + 64
    assert found["late_pieces"] == 0, "alone, it finds everything on its way"
    assert not backend.races


@pytest.mark.parametrize("policy", list(POLICIES))
def test_policies(policy: str, pieces: int) -> None:
    plain, ours = both()
    assert_same(plain, ours, chat(LONG), repair=POLICIES[policy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families(family: str, dtype: torch.dtype) -> None:
    plain, ours = both(model=tiny_model(family, dtype=dtype))
    for policy in ("fast", "balanced"):
        assert_same(plain, ours, chat([LONG[2], LONG[0], LONG[3]]), repair=policy)


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_cut_off_repeated_own_head_and_missed_chunks(policy: str, pieces: int) -> None:
    plain, ours = both()
    for engine in (plain, ours):
        engine.warm(LONG[:1], head=SYSTEM)
    text = LONG[1][: len(LONG[1]) * 2 // 3]
    for docs in ([LONG[0], LONG[1], LONG[0]], [LONG[0], text], ["Nobody knows this one yet, it is new.", LONG[2]]):
        assert_same(plain, ours, chat(docs, question=""), repair=policy)
        assert_same(plain, ours, chat(docs), repair=policy, chunks=docs)


def test_a_repeated_chunk_crosses_once() -> None:
    _, ours = both()
    sent = []
    for docs in ([LONG[0]], [LONG[0], LONG[0]]):
        before = carried(ours)["bytes_carried"]
        assert prepared(ours, chat(docs), chunks=docs)[1].hits == len(docs)
        sent.append(carried(ours)["bytes_carried"] - before)
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("compression", ["int8", "int4"])
@pytest.mark.parametrize("store", ["memory", "folder"])
def test_compressed_blocks(store: str, compression: str, tmp_path: Path) -> None:
    engines = [
        make_engine(
            store="memory" if store == "memory" else tmp_path / str(way), compression=compression, carry=way,
            kv_backend=VirtualBackend(), **QUIET,
        )
        for way in (False, "auto")
    ]  # fmt: skip
    for engine in engines:
        engine.warm(LONG)
    for policy in ("fast", "balanced"):
        assert_same(*engines, chat(LONG), repair=policy)
    # What a memory tier keeps packed is unpacked by the host at each hit, into ordinary memory.
    assert (carried(engines[1])["page_locked_bytes"] > 0) == (store == "folder")


def test_a_held_prefix_in_front() -> None:
    plain, ours = (
        make_engine(kv_backend=VirtualBackend(), carry=way, on_low_fidelity="ignore") for way in (False, "auto")
    )
    for engine in (plain, ours):
        engine.warm(LONG)
        engine.generate(chat(LONG[:1]), max_new_tokens=2)
    assert assert_same(plain, ours, chat(LONG[:3])).prefix_tokens > 0


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_model(smollm2: Any) -> None:
    texts = [" ".join(LONG[i:] + LONG[:i]) for i in range(4)]
    options = {"kv_backend": VirtualBackend(order="random"), "store": "memory", **QUIET}
    plain, ours = (KVBoost(smollm2.model, smollm2.tokenizer, carry=way, **options) for way in (False, "auto"))
    for engine in (plain, ours):
        engine.warm(texts)
    for policy in ("fast", "balanced"):
        assert_same(plain, ours, chat(texts[::-1]), repair=policy)


# --- together with everything else ------------------------------------------------------------------------------------


class Mixed(SlowStore):
    """Blocks of ``near`` texts are in memory, the others come layer by layer."""

    near: frozenset[str] = frozenset()

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        slow = super().open_many(keys)
        return [self.get(key) if key in self.near else found for key, found in zip(keys, slow, strict=True)]


def mixed(**options: Any) -> tuple[KVBoost, KVBoost, Mixed]:
    """(laid before the forward, some carried while others arrive, the store of these)"""
    store, backend = Mixed(), options.pop("backend", VirtualBackend(order="random"))
    plain = make_engine(store=MemoryStore(), carry=False, kv_backend=backend, **QUIET, **options)
    ours = make_engine(store=store, kv_backend=backend, **QUIET, **options)
    for engine in (plain, ours):
        engine.warm(LONG)
    encoder = ours.encoder()
    store.near = frozenset(encoder.key(encoder.tokenize(text)) for text in (LONG[0], LONG[2]))
    return plain, ours, store


@pytest.mark.parametrize("policy", ["fast", "balanced", "faithful", "deviation", "full"])
def test_some_arrive_from_disk_and_others_are_in_memory(policy: str) -> None:
    plain, ours, store = mixed()
    report = assert_same(plain, ours, chat(LONG), repair=POLICIES[policy])
    assert "wait" in report.stages
    assert len(store.whole) == 2


@pytest.mark.parametrize("policy", ["fast", "balanced"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_what_was_carried_is_carried_again_when_a_forward_begins_anew(policy: str, layer: int) -> None:
    plain, ours, store = mixed()
    victim = ours.encoder().key(ours.encoder().tokenize(LONG[3]))
    plain.store.delete(victim)

    def before(key: str, at: int) -> None:
        if key == victim and at == layer:
            store.delete(victim)
            raise Unavailable("gone")

    store.before = before
    got, report = prepared(ours, chat(LONG), repair=policy)
    want, expected = prepared(plain, chat(LONG), repair=policy)
    assert torch.equal(got.logits, want.logits)
    assert [c.outcome for c in report.chunks] == [c.outcome for c in expected.chunks] == ["hit", "hit", "hit", "miss"]


@pytest.mark.parametrize("times", [1, 3, 8])
@pytest.mark.parametrize("policy", ["fast", "balanced", "deviation", "shifted", "full"])
def test_pages(policy: str, times: int, pieces: int) -> None:
    """Part of the target is host memory, which no copy passes through the device for."""
    budget = KVBudget(times * least_budget(make_engine()).nbytes, PAGE)
    plain, ours = both(kv_vram=budget)
    assert_same(plain, ours, chat(LONG), repair=POLICIES[policy], carries=times > 1)
    answers = [e.generate(chat(LONG), max_new_tokens=8).token_ids for e in (plain, ours)]
    assert answers[0] == answers[1]


def places_of(engine: KVBoost, docs: Sequence[str]) -> list[tuple[int, int, Block]]:
    """``docs`` one behind the other, with room in front and between."""
    encoder, places, end = engine.encoder(), [], 2
    for text in docs:
        block = engine.store.get(encoder.key(encoder.tokenize(text)))
        assert isinstance(block, Block)
        places.append((end + 3, end + 3 + block.num_tokens, block))
        end += 3 + block.num_tokens
    return places


def begun(engine: KVBoost, docs: Sequence[str]) -> tuple[Any, Carriage]:
    """A cache, and ``docs`` on their way to it."""
    cache, places = engine.adapter.new_cache(4000), places_of(engine, docs)
    cache.extend(places[-1][1])
    cache.clear(torch.arange(places[-1][1]))
    assert engine.engine.carrier is not None
    carriage = engine.engine.carrier.begin(cache, places, Report())
    assert carriage is not None
    return cache, carriage


def laid(engine: KVBoost, docs: Sequence[str]) -> torch.Tensor:
    """What should be in the cache then."""
    cache, places = engine.adapter.new_buffer(4000), places_of(engine, docs)
    cache.clear(torch.arange(places[-1][1]))
    for start, end, block in places:
        carriage_module.lay(cache, start, end, block.kv, engine.adapter.rope)
    return dense(engine, cache, cache.length)


def test_pages_that_move_before_a_layer_is_laid() -> None:
    """Another request takes the device's pages while this one is between two layers."""
    _, ours = both(kv_vram=KVBudget(12 * least_budget(make_engine()).nbytes, PAGE))
    cache, carriage = begun(ours, LONG)
    carriage.lay(cache, 1)
    before, other = cache.host_length, ours.adapter.new_cache(2000)
    taken = ours.adapter.pages.sizes.pages * PAGE - PAGE  # type: ignore[union-attr]
    other.extend(taken)
    assert cache.host_length > before + len(LONG[0])
    for _, _, view in other.fill(0, taken):
        view.fill_(7.0)
    carriage.lay(cache, LAYERS - 1)
    carriage.close()
    assert torch.equal(dense(ours, cache, cache.length), laid(ours, LONG))
    assert all(bool((view == 7.0).all()) for _, _, view in other.read(0, taken)), "they are not ours any more"


def test_requests_take_turns_with_the_buffers(pieces: int) -> None:
    """Another request comes between this one's pass that scores and its forward: what was on its way is sent again."""
    _, ours = both()
    orders = [[LONG[i] for i in order] for order in ((0, 1, 2), (3, 0))]
    started = [begun(ours, order) for order in orders]
    for layer in range(LAYERS):
        for cache, carriage in started[:: 1 if layer % 2 else -1]:
            carriage.lay(cache, layer)
    for (cache, carriage), order in zip(started, orders, strict=True):
        carriage.close()
        assert torch.equal(dense(ours, cache, cache.length), laid(ours, order))
    assert carried(ours)["late_pieces"] > 0


@pytest.mark.parametrize("order", ORDERS)
def test_streamed_weights(order: Any, tmp_path: Path) -> None:
    """One stream for the copies of both."""
    save_tiny(tmp_path)
    backend = VirtualBackend(order=order)
    plain, ours = (
        streamed_engine(tmp_path, budget_for(tmp_path, 1), backend, carry=way, on_low_fidelity="ignore")
        for way in (False, "auto")
    )
    for engine in (plain, ours):
        engine.warm(LONG)
    for policy in ("fast", "balanced", "deviation", "full"):
        assert_same(plain, ours, chat(LONG), repair=POLICIES[policy])
    streaming: Any = ours.stats()["streaming"]
    assert streaming["bytes_copied"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_streaming_pages_arrivals_and_repair_at_once(seed: int, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    backend, stores = VirtualBackend(order="random", seed=seed), [MemoryStore(), Mixed()]
    kv = KVBudget(8 * least_budget(make_engine()).nbytes, PAGE)
    options: dict[str, Any] = {"on_low_fidelity": "ignore", "overlap": "auto"}
    engines = [
        everything(tmp_path, kv, backend, store=store, carry=way, **options)
        for store, way in zip(stores, (False, "auto"), strict=True)
    ]
    for engine in engines:
        engine.warm(LONG)
    encoder = engines[1].encoder()
    stores[1].near = frozenset(encoder.key(encoder.tokenize(text)) for text in LONG[1:3])  # type: ignore[attr-defined]
    for policy in ("fast", "balanced", "mixed"):
        report = assert_same(*engines, chat(LONG), repair=POLICIES[policy])
        assert "wait" in report.stages
    assert not backend.races


def test_a_cost_model_is_told_how_long_copies_take() -> None:
    """Each is waited for, in a stage of its own: a forward's seconds are its own."""
    plain, ours = both(cost_model=True)
    for docs in (LONG[:2], LONG[2:]):
        want, got = (e.generate(chat(docs), max_new_tokens=4) for e in (plain, ours))
        assert want.token_ids == got.token_ids
        assert got.report.hits == 2
        assert "wait" not in want.report.stages
        assert got.report.stages["wait"] > 0
    assert ours.engine.costs is not None
    assert ours.engine.costs.load, "it has learned what loading takes"


# --- how it is done ---------------------------------------------------------------------------------------------------


def test_the_next_layer_is_under_way_while_one_computes() -> None:
    _, ours = both()
    ahead: list[int] = []
    before = carried(ours)["pieces"]
    handles = [
        layer.register_forward_hook(lambda *args: ahead.append(carried(ours)["pieces"] - before))
        for layer in ours.model.model.layers
    ]
    prepared(ours, chat(LONG), repair="fast")
    for handle in handles:
        handle.remove()
    assert ahead == [min(LAYERS, layer + 2) for layer in range(LAYERS)]


class Calls(TorchDispatchMode):
    """Counts what would be kernels on a device: no views, and no copies to the buffers."""

    VIEWS = frozenset({"view", "select", "slice", "unsqueeze", "expand", "_reshape_alias", "detach", "alias"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.partition("::")[2] not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_laying_a_layer_takes_few_calls_however_many_blocks() -> None:
    _, ours = both(VirtualBackend(order="early"), model=tiny_model(dtype=torch.bfloat16))
    texts = [f"{i}: {text}" for i in range(4) for text in LONG]
    ours.warm(texts)
    counts = []
    for some in (texts[:2], texts):
        cache, carriage = begun(ours, some)
        carriage.lay(cache, LAYERS - 2)  # all is sent, but for the last layer
        with Calls() as calls:
            carriage.lay(cache, LAYERS - 1)
        counts.append(calls.count)
        carriage.close()
    assert counts[0] == counts[1] < 20


class NoWait(VirtualBackend):
    """The host must not wait, once that is said."""

    strict = False

    def synchronize(self, event: Any) -> None:
        assert not self.strict, "the host waits"
        VirtualBackend.synchronize(self, event)


def test_the_host_never_waits() -> None:
    backend = NoWait(order="late")
    plain, ours = both(backend)
    for policy in ("fast", "balanced", "deviation"):
        backend.strict = True
        assert_same(plain, ours, chat(LONG), repair=POLICIES[policy])
        backend.strict = False


@pytest.mark.parametrize(("what", "message"), [("copy", "still being read"), ("compute", "before the copy")])
def test_a_missing_wait_is_caught(what: str, message: str) -> None:
    _, ours = both(forgetful(what))
    with pytest.raises(RaceError, match=message):
        prepared(ours, chat(LONG))


def test_without_the_checker_the_poison_shows() -> None:
    _, ours = both(forgetful("compute", check=False))
    assert prepared(ours, chat(LONG), repair="fast")[0].logits.isnan().any()


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    backend = VirtualBackend(order="late")
    plain, ours = both(backend)

    def fail(*args: Any) -> None:
        raise RuntimeError("the device is gone")

    handle = ours.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        prepared(ours, chat(LONG))
    handle.remove()
    assert_same(plain, ours, chat(LONG))
    assert not backend.races


@pytest.mark.parametrize("number", [1, 6, 11])
def test_a_copy_that_cannot_be_sent_leaves_nothing_unlocked_under_another(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones are sent before anything is known to have begun."""
    backend = VirtualBackend(order="late")
    plain, ours = both(backend)
    sent, copy = [0], VirtualBackend.copy

    def failing(self: VirtualBackend, target: torch.Tensor, source: torch.Tensor) -> None:
        sent[0] += 1
        if sent[0] == number:
            raise torch.OutOfMemoryError("no room to send it")
        copy(self, target, source)

    monkeypatch.setattr(VirtualBackend, "copy", failing)
    with pytest.raises(torch.OutOfMemoryError):
        prepared(ours, chat(LONG))
    monkeypatch.undo()
    ours.store.clear()
    gc.collect()
    assert not backend.races
    ours.warm(LONG)
    assert_same(plain, ours, chat(LONG))


def test_what_was_carried_is_let_go_of_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the device has come so far, and not only when the next request comes."""
    backend = VirtualBackend(order="early")
    _, ours = both(backend)
    copied = False

    def first_token(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied = True
        return scores

    monkeypatch.setattr(VirtualBackend, "happened", lambda self, event: copied)
    ours.generate(chat(LONG), max_new_tokens=1, logits_processors=[first_token])
    ours.store.clear()
    gc.collect()
    assert backend.locked == 0
    assert not backend.races


def test_a_cancelled_request_lets_go() -> None:
    plain, ours, store = mixed()
    cancel = CancelToken()

    def before(key: str, layer: int) -> None:
        if layer == 2:
            cancel.cancel()
            raise Unavailable("left")

    store.before = before
    result = ours.generate(chat(LONG), cancel=cancel)
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    store.before = lambda key, layer: None
    assert_same(plain, ours, chat(LONG))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_blocks_lie_in_page_locked_memory_and_it_is_given_back() -> None:
    backend = VirtualBackend(order="late")
    _, ours = both(backend)
    held = carried(ours)
    assert held["page_locked_bytes"] >= ours.store.stats().bytes > 0
    assert backend.locked == held["page_locked_bytes"]
    prepared(ours, chat(LONG))
    ours.store.clear()
    gc.collect()
    assert not backend.races, "memory is not unlocked under a copy"
    ours.close()
    gc.collect()
    assert backend.locked == 0
    assert carried(ours) | {"slot_bytes": 0, "page_locked_bytes": 0, "pageable_bytes": 0} == carried(ours)


def test_memory_that_is_dropped_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is cut leaves copies under way; its blocks are evicted. Held, they stay locked; without, the
    stand-in tells."""
    for held in (True, False):
        backend = VirtualBackend(order="late")
        _, ours = both(backend)
        if not held:
            monkeypatch.setattr(Ring, "keep", lambda self, sources: None)
        handle = ours.model.model.layers[1].register_forward_hook(cut)
        with pytest.raises(ZeroDivisionError):
            prepared(ours, chat(LONG))
        handle.remove()
        ours.store.clear()
        gc.collect()
        assert bool(backend.races) != held
        assert (backend.locked > 0) == held
        if held:
            ours.close()
            assert (backend.locked, backend.races) == (0, [])


def cut(*args: Any) -> None:
    raise ZeroDivisionError


def test_evicted_blocks_are_unlocked() -> None:
    backend = VirtualBackend()
    engine = make_engine(kv_backend=backend, memory_bytes=1 << 20, **QUIET)
    for i in range(12):
        engine.warm([f"{i}: {text}" for text in LONG])
    stats = engine.store.stats()
    assert stats.evictions > 0
    gc.collect()
    pages = stats.blocks * 4096
    assert stats.bytes <= carried(engine)["page_locked_bytes"] == backend.locked <= stats.bytes + pages


@pytest.mark.parametrize(("options", "locked"), [({"lock_each": 0}, False), ({"lock_each": 0, "lock_new": True}, True)])
def test_refused_page_locking_is_said_once(options: Any, locked: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain, ours = both(VirtualBackend(order="random", **options))
    assert_same(plain, ours, chat(LONG))
    found = carried(ours)
    assert (found["page_locked_bytes"] > 0, found["pageable_bytes"] > 0) == (locked, not locked)
    assert sum("page-locked" in r.getMessage() for r in caplog.records) == (not locked)


def test_no_room_for_the_buffers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours = both(VirtualBackend(limit=1000))
    for _ in range(2):
        want, got = (prepared(e, chat(LONG))[0] for e in (plain, ours))
        assert torch.equal(want.logits, got.logits)
    assert carried(ours)["bytes_carried"] == 0
    assert sum("before a forward" in r.getMessage() for r in caplog.records) == 1


def test_blocks_that_move_up_from_a_folder_are_page_locked(tmp_path: Path) -> None:
    make_engine(store=tmp_path, **QUIET).warm(LONG)
    engine = make_engine(store=tmp_path, kv_backend=VirtualBackend(), **QUIET)
    prepared(engine, chat(LONG))
    found = carried(engine)
    assert found["bytes_carried"] == 0, "they arrived"
    assert found["page_locked_bytes"] > 0
    prepared(engine, chat(LONG))
    assert carried(engine)["bytes_carried"] > 0


def test_a_caller_in_inference_mode_changes_nothing() -> None:
    plain, ours = both()
    with torch.inference_mode():
        assert_same(plain, ours, chat(LONG), repair="fast")
    assert_same(plain, ours, chat(LONG))


def test_two_engines_share_a_store() -> None:
    store, backend = MemoryStore(), VirtualBackend(order="random")
    first, second = (make_engine(store=store, kv_backend=backend, **QUIET) for _ in range(2))
    first.warm(LONG)
    want, got = prepared(first, chat(LONG))[0], prepared(second, chat(LONG))[0]
    assert torch.equal(want.logits, got.logits)
    assert carried(second)["bytes_carried"] == carried(first)["bytes_carried"] > 0


# --- when it is not done ----------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_carried() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    assert engine.generate(chat(), max_new_tokens=1).report.hits == 4
    assert engine.stats()["carrier"] is None
    paged = make_engine(kv_vram=least_budget(engine))
    assert paged.stats()["carrier"] is None, "the stand-in of pages is no device"


class Odd(MemoryStore):
    """A user's own: some of its blocks lie in memory in another order, or in another precision."""

    def get(self, key: str) -> Block | Miss:
        block = super().get(key)
        if isinstance(block, Miss) or block.num_tokens % 2:
            return block
        kv = block.kv.transpose(0, 3).contiguous().transpose(0, 3)
        return replace(block, kv=kv if block.num_tokens % 4 else block.kv.double())


def test_blocks_that_no_plain_copy_brings_over_are_laid_before() -> None:
    backend = VirtualBackend()
    plain, ours = (make_engine(store=Odd(), kv_backend=backend, carry=way, **QUIET) for way in (False, "auto"))
    texts = [f"{i} {LONG[0]}{' river' * i}" for i in range(6)]
    for engine in (plain, ours):
        engine.warm(texts)
    encoder = ours.encoder()
    lengths = {len(encoder.tokenize(text)) % 4 for text in texts}
    assert {0, 2} < lengths, "there is one of each kind"
    for policy in ("fast", "balanced"):
        assert_same(plain, ours, chat(texts), repair=policy)


def test_blocks_too_large_for_the_buffers_are_laid_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (carriage_module, carrier_module):
        monkeypatch.setattr(module, "PIECE", 1000)
    plain, ours = both()
    assert_same(plain, ours, chat(LONG), carries=False)


def test_only_auto_or_false() -> None:
    for value in (True, "on", None, 1):
        with pytest.raises(UsageError, match="carry"):
            make_engine(carry=value)


def test_a_plan_counts_the_buffers() -> None:
    both_buffers = 2 * carriage_module.PIECE
    assert device_bytes("8GiB", None, prefix_bytes=5) == device_bytes(Budget(8 << 30), None) == both_buffers
    assert device_bytes(Budget(8 << 30, workspace=1000), None) == 1000
    assert device_bytes("auto", None, carry=False) == device_bytes("auto", None, reuse="off") == 0
    assert device_bytes("auto", VirtualBackend()) == 0
