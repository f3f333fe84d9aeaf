"""Answers with the store's tier on the device: the same bits, the slower tiers are left in peace, and nothing comes back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import CancelToken, KVBoost
from kvboost_rag.engine.arrivals import Arrivals
from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store import BlockStore, DeviceStore, DeviceTieredStore, MemoryStore, Miss, TieredStore
from kvboost_rag.store.arriving import ArrivingBlock
from tests.engine.helpers import DOCS, POLICIES, SYSTEM, chat, make_engine, prepared
from tests.engine.slow_store import Gate, SlowStore
from tests.engine.test_cost import set_costs
from tests.paged.helpers import least_budget
from tests.store.device import LateMemory
from tests.streaming.helpers import budget_for, streamed_engine
from tests.tiny import save_tiny

OPTIONS: dict[str, Any] = {"prefix_bytes": 0, "on_low_fidelity": "ignore"}


class Asked(MemoryStore):
    """Notes which keys it was asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[str] = []

    def get(self, key: str) -> Block | Miss:
        self.asked.append(key)
        return super().get(key)


def tiered(
    nbytes: int = 1 << 30, memory: LateMemory | None = None, **options: Any
) -> tuple[KVBoost, DeviceStore, LateMemory]:
    memory = memory or LateMemory()
    near = DeviceStore(nbytes, memory)
    return make_engine(store_vram=near, **{**OPTIONS, **options}), near, memory


def size_of(engine: KVBoost, texts: Sequence[str] = DOCS) -> int:
    return sum(len(engine._encoder.tokenize(text)) for text in texts) * engine.adapter.spec.bytes_per_token


def answer(engine: KVBoost, prompt: Any = None, **options: Any) -> Any:
    return engine.generate(prompt or chat(), max_new_tokens=3, **options)


def bits(engine: KVBoost, prompt: Any = None, **options: Any) -> torch.Tensor:
    done, report = prepared(engine, prompt or chat(), **options)
    assert {c.outcome for c in report.chunks} == {"hit"}
    return torch.cat([done.logits.flatten(), done.cache.kv[:, :, :, : done.prompt.num_tokens].flatten()])


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mqa", "qwen3", "phi3", "yarn", "mistral"])
def test_families_give_the_same_bits(family: str) -> None:
    plain, (engine, near, _) = make_engine(family, **OPTIONS), tiered(family=family)
    for e in (plain, engine):
        e.warm(DOCS)
    assert near.stats().blocks == len(DOCS)
    assert torch.equal(bits(engine), bits(plain))
    assert near.stats().hits == len(DOCS)


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_and_compressions_give_the_same_bits(policy: str, compression: str) -> None:
    """From the device after a warm-up, and from below first and from the device then."""
    plain = make_engine(compression=compression, **OPTIONS)
    plain.warm(DOCS, head=SYSTEM)
    engine, near, _ = tiered(compression=compression)
    engine.warm(DOCS, head=SYSTEM)
    expected = bits(plain, repair=POLICIES[policy])
    assert torch.equal(bits(engine, repair=POLICIES[policy]), expected)
    near.clear()
    for blocks in (0, len(DOCS)):
        assert near.stats().blocks == blocks
        assert torch.equal(bits(engine, repair=POLICIES[policy]), expected)
        told = [answer(e, repair=POLICIES[policy]) for e in (engine, plain)]
        assert told[0].token_ids == told[1].token_ids
        assert [c.reason for c in told[0].report.chunks] == [c.reason for c in told[1].report.chunks]
        assert told[0].report.exact == told[1].report.exact


@pytest.mark.parametrize("packs", [False, True])
def test_what_a_forward_over_several_chunks_leaves_is_right(packs: bool) -> None:
    plain, (engine, near, memory) = make_engine(**OPTIONS), tiered()
    for e in (plain, engine):
        e.warm(DOCS, packs=packs)
    assert (near.stats().blocks, memory.copied, memory.adopted) == (len(DOCS), 0, len(DOCS))
    assert torch.equal(bits(engine), bits(plain))
    for key in near.keys():
        held, below = near.get(key), engine.store.levels()[1].get(key)
        assert isinstance(held, Block)
        assert isinstance(below, Block)
        assert torch.equal(held.kv, below.kv)
        assert held.kv.untyped_storage().nbytes() == held.nbytes, "nothing of the forward is kept alive"


@pytest.mark.parametrize("policy", ["fast", "balanced", "faithful"])
def test_pages_that_spill_give_the_same_logits(policy: str) -> None:
    plain = make_engine(**OPTIONS)
    engine, near, _ = tiered(kv_vram=least_budget(plain))
    for e in (plain, engine):
        e.warm(DOCS)
    ours, theirs = (e.score(chat(), [40, 50, 60], repair=policy, logits=True) for e in (engine, plain))
    assert near.stats().hits == len(DOCS)
    assert ours.report.host_tokens > 0
    assert (ours.logits - theirs.logits).abs().max() < 1e-3


# --- what moves, and when ---------------------------------------------------------------------------------------------


def test_a_second_request_reads_no_slower_tier() -> None:
    below = Asked()
    engine, near, memory = tiered(store=below)
    engine.warm(DOCS)
    near.clear()
    answer(engine)
    assert len(below.asked) == len(DOCS)
    assert memory.copied == len(DOCS), "one copy for each"
    below.asked.clear()
    for order in (DOCS, DOCS[::-1], DOCS[2:] + DOCS[:2]):
        result = answer(engine, chat(order))
        assert {c.outcome for c in result.report.chunks} == {"hit"}
    assert below.asked == []
    assert memory.copied == len(DOCS)


def test_the_first_token_does_not_wait_for_the_copy() -> None:
    engine, near, memory = tiered()
    engine.warm(DOCS)
    near.clear()
    pieces = engine.stream(chat(), max_new_tokens=3)
    next(pieces)
    assert (memory.copied, near.stats().blocks) == (0, 0)
    list(pieces)
    assert (memory.copied, near.stats().blocks) == (len(DOCS), len(DOCS))


def test_misses_stay_where_they_were_computed() -> None:
    below = Asked()
    engine, near, memory = tiered(store=below)
    result = answer(engine, chunks=DOCS)
    assert result.report.stored_tokens > 0
    assert near.stats().blocks == len(DOCS)
    assert (memory.copied, memory.adopted) == (0, len(DOCS))
    below.asked.clear()
    assert {c.outcome for c in answer(engine).report.chunks} == {"hit"}
    assert below.asked == []


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_miss_moves_into_a_full_tier_as_it_will_come_back(compression: str) -> None:
    """Not as it was computed, where the store rounds: answers do not depend on which tier had a block."""
    probe = make_engine(**OPTIONS)
    engine, near, _ = tiered(size_of(probe, DOCS[1:3]), compression=compression)
    engine.warm(DOCS[:2])
    answer(engine, chat(DOCS[2:3]), chunks=DOCS[2:3])
    (key,) = {engine._encoder.key(engine._encoder.tokenize(DOCS[2]))}
    held, below = near.get(key), engine.store.levels()[1].get(key)
    assert isinstance(held, Block)
    assert isinstance(below, Block)
    assert held.header == below.header
    assert torch.equal(held.kv, below.kv)


def test_a_large_corpus_fills_the_tier_and_what_is_used_takes_its_place() -> None:
    texts = [f"{text} Number {i}." for i in range(4) for text in DOCS]
    probe = make_engine(**OPTIONS)
    room = max(size_of(probe, texts[4 * i : 4 * i + 4]) for i in range(4))
    engine, near, memory = tiered(room)
    engine.warm(texts)
    warmed = set(near.keys())
    assert 0 < len(warmed) < len(texts)
    assert (near.stats().evictions, near.stats().skipped_writes) == (0, 0)
    engine.warm(texts)
    assert set(near.keys()) == warmed
    for asked in (texts[4:8], texts[8:12], ["A text that no store knows, for the fifth time."] * 2):
        answer(engine, chat(asked), chunks=asked)
        keys = {engine._encoder.key(engine._encoder.tokenize(text)) for text in asked}
        assert keys <= set(near.keys()), "hits and misses alike"
        assert near.stats().bytes <= room
    assert near.stats().evictions > 0
    assert memory.peak <= room


def test_a_request_larger_than_the_tier_moves_once() -> None:
    probe = make_engine(**OPTIONS)
    engine, near, memory = tiered(size_of(probe) * 2 // 3)
    engine.warm(DOCS)
    near.clear()
    memory.copied = 0
    for _ in range(3):
        assert {c.outcome for c in answer(engine).report.chunks} == {"hit"}
    assert 0 < near.stats().blocks < len(DOCS)
    assert memory.copied == near.stats().blocks, "it does not drive out its own blocks, time after time"


def test_a_cancelled_request_moves_nothing() -> None:
    engine, near, memory = tiered()
    engine.warm(DOCS)
    near.clear()
    cancel = CancelToken()
    pieces = engine.stream(chat(), max_new_tokens=30, cancel=cancel)
    next(pieces)
    cancel.cancel()
    list(pieces)
    assert (memory.copied, near.stats().blocks) == (0, 0)


def test_scoring_leaves_the_tier_as_it_is() -> None:
    engine, near, memory = tiered()
    engine.warm(DOCS)
    near.clear()
    engine.score(chat(), [40, 50])
    assert (memory.copied, near.stats().blocks) == (0, 0)


# --- blocks that are on their way -------------------------------------------------------------------------------------


def test_arriving_blocks_move_when_they_are_whole() -> None:
    gate, store = Gate(1), SlowStore()
    engine, near, memory = tiered(store=store)
    engine.warm(DOCS)
    near.clear()
    store.before = gate
    threading.Thread(target=gate.let, args=(99,)).start()
    first = answer(engine)
    assert "wait" in first.report.stages
    assert (near.stats().blocks, memory.copied) == (len(DOCS), len(DOCS))
    store.read.clear()
    second = answer(engine)
    assert store.read == []
    assert second.token_ids == first.token_ids
    assert len(store.whole) == len(DOCS)


def test_a_block_that_is_lost_does_not_move() -> None:
    lost: list[str] = []

    def before(key: str, layer: int) -> None:
        if layer == 2 and (not lost or key in lost):
            lost.append(key)
            raise MemoryError

    store = SlowStore()
    engine, near, _ = tiered(store=store)
    engine.warm(DOCS)
    near.clear()
    store.before = before
    result = answer(engine)
    assert [c.outcome for c in result.report.chunks].count("miss") == 1
    assert set(near.keys()) >= {key for key in store.keys() if key not in lost}
    for key in near.keys():
        block = near.get(key)
        assert isinstance(block, Block)
        assert torch.isfinite(block.kv).all(), "the miss was encoded again, nothing half read moved"


@pytest.mark.parametrize("device", [False, True])
def test_a_forward_that_is_faster_than_the_loaders_loses_nothing(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers were read, and the request was done before anybody could count the block and move it up."""
    monkeypatch.setattr(Arrivals, "_finish", lambda self, block: None)
    below = SlowStore()
    store = TieredStore([MemoryStore(), below])
    engine, near, _ = tiered(store=store) if device else (make_engine(store=store, **OPTIONS), store.tiers[0], None)
    engine.warm(DOCS)
    near.clear()
    store.tiers[0].clear()
    pieces = engine.stream(chat(), max_new_tokens=3)
    next(pieces)
    assert near.stats().blocks == 0
    list(pieces)
    assert near.stats().blocks == store.tiers[0].stats().blocks == len(DOCS)
    assert len(below.whole) == len(DOCS)
    below.read.clear()
    assert {c.outcome for c in answer(engine).report.chunks} == {"hit"}
    assert below.read == []
    assert engine.store.stats().hits == 2 * len(DOCS)


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_abandoned_is_whole_only_if_every_layer_was_read(missing: int) -> None:
    store = SlowStore()
    engine = make_engine(store=store, **OPTIONS)
    engine.warm(DOCS[:1])
    (arriving,) = store.open_many([*store.keys()])
    assert isinstance(arriving, ArrivingBlock)
    for layer in range(arriving.num_layers - missing):
        arriving.read(layer)
    arriving.abandon()
    assert len(store.left) == missing
    found = arriving.finish()
    assert (found is None) == bool(missing)
    assert arriving.whole is found
    assert arriving.finish() is None, "it counts once"


# --- a device without memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_device_without_memory_harms_no_answer(blocks: int) -> None:
    plain = make_engine(**OPTIONS)
    plain.warm(DOCS)
    memory = LateMemory(0)
    engine, near, _ = tiered(memory=memory)
    memory.nbytes = size_of(engine, DOCS[:blocks])
    engine.warm(DOCS)
    near.clear()
    for _ in range(2):
        result = answer(engine)
        assert result.token_ids == answer(plain).token_ids
        assert {c.outcome for c in result.report.chunks} == {"hit"}
    assert near.stats().blocks == blocks
    assert near.stats().skipped_writes > 0
    assert memory.refused > 0
    assert answer(engine, chat(["Another text that is not known, on a device that is full."])).token_ids
    assert torch.equal(bits(engine), bits(plain))


# --- nothing comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["delete", "tag", "clear"])
def test_what_is_deleted_during_an_answer_does_not_move_up(what: str) -> None:
    engine, near, _ = tiered()
    engine.warm(DOCS, tags=("doc",))
    near.clear()
    pieces = engine.stream(chat(), max_new_tokens=3)
    next(pieces)
    {
        "delete": lambda: [engine.store.delete(key) for key in [*engine.store.keys()]],
        "tag": lambda: engine.store.delete_tagged("doc"),
        "clear": engine.store.clear,
    }[what]()
    list(pieces)
    assert [*near.keys()] == []
    assert {c.outcome for c in answer(engine, chunks=DOCS).report.chunks} == {"miss"}


def test_tenants_share_a_tier_and_no_block() -> None:
    below = MemoryStore()
    one, near, _ = tiered(store=below, salt="one")
    other = make_engine(model=one.model, store=one.store, salt="other", **OPTIONS)
    one.warm(DOCS)
    assert {c.outcome for c in answer(other, chunks=DOCS).report.chunks} == {"miss"}
    assert near.stats().tenants == 2
    for engine in (one, other):
        assert {c.outcome for c in answer(engine).report.chunks} == {"hit"}


def test_two_engines_have_a_tier_each_over_one_store() -> None:
    below = Asked()
    (one, near_one, _), (two, near_two, _) = (tiered(store=below) for _ in range(2))
    one.warm(DOCS)
    assert (near_one.stats().blocks, near_two.stats().blocks) == (len(DOCS), 0)
    first = answer(two)
    assert near_two.stats().blocks == len(DOCS)
    below.asked.clear()
    assert [answer(e).token_ids for e in (one, two)] == [first.token_ids] * 2
    assert below.asked == []


def test_who_shares_a_tier_knows_what_others_delete() -> None:
    one, near, _ = tiered(store=(below := MemoryStore()))
    two = make_engine(model=one.model, store=below, store_vram=near, **OPTIONS)
    one.warm(DOCS)
    near.clear()
    pieces = two.stream(chat(), max_new_tokens=3)
    next(pieces)
    one.store.clear()
    list(pieces)
    assert [*near.keys()] == []


def test_a_chunk_that_does_not_fit_keeps_no_other_out() -> None:
    texts = [" ".join(DOCS[:3]), DOCS[3]]
    engine, near, _ = tiered(1)
    large, small = (size_of(engine, [text]) for text in texts)
    for nbytes, refused in ((small + 1, 1), (large + small - 1, 0)):  # larger than the tier; larger than what is left
        engine, near, _ = tiered(nbytes)
        engine.warm(texts)
        near.clear()
        answer(engine, chat(texts), chunks=texts)
        assert near.stats().blocks == 1
        assert near.stats().skipped_writes >= refused


def test_misses_and_pins_drive_out_nothing_of_the_request() -> None:
    engine, near, _ = tiered(1)
    new = "Ravens of the north tower count the ships that come in before noon."
    engine, near, _ = tiered(size_of(engine))
    engine.warm(DOCS)
    answer(engine, chat([*DOCS, new]), chunks=[*DOCS, new])
    keys = {engine._encoder.key(engine._encoder.tokenize(text)) for text in DOCS}
    assert keys == set(near.keys())
    fresh, *others, pinned = sorted(DOCS, key=lambda text: size_of(engine, [text]))
    engine, near, _ = tiered(size_of(engine, [*others, pinned]))
    engine.warm([*others, pinned])
    of = {text: engine._encoder.key(engine._encoder.tokenize(text)) for text in DOCS}
    assert near.pin([of[pinned]]) == 1
    answer(engine, chat([*others, fresh]), chunks=[*others, fresh])
    assert {of[text] for text in (*others, pinned)} == set(near.keys())


def test_threads_over_a_small_tier() -> None:
    probe = make_engine(**OPTIONS)
    room = size_of(probe) * 2 // 3
    plain = make_engine(**OPTIONS)
    plain.warm(DOCS)
    engine, near, memory = tiered(room)
    engine.warm(DOCS)
    prompts = [chat(DOCS[i:] + DOCS[:i]) for i in range(4)]
    expected = [answer(plain, prompt).token_ids for prompt in prompts]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for step in range(6):
            i = (offset + step) % 4
            if answer(engine, prompts[i]).token_ids != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert near.stats().bytes <= room
    assert engine.store.check() == []
    engine.close()
    assert memory.alive == 0


# --- what users see ---------------------------------------------------------------------------------------------------


def test_any_store_may_lie_below(tmp_path: Path) -> None:
    for store in (tmp_path, "memory", MemoryStore(), f"file://{tmp_path}/served"):
        engine, near, _ = tiered(store=store)
        engine.warm(DOCS)
        near.clear()
        results = [answer(engine) for _ in range(2)]
        assert results[0].token_ids == results[1].token_ids
        assert near.stats().hits == len(DOCS)
        found: Any = engine.stats()["store"]
        assert found["tiers"][0]["kind"] == "vram"
        assert found["tiers"][0]["blocks"] == len(DOCS)
        assert found["hits"] == 2 * len(DOCS)
        engine.close()


def test_the_cost_model_counts_the_tier(tmp_path: Path) -> None:
    engine, _, _ = tiered(store=tmp_path, cost_model=True)
    engine.warm(DOCS)
    for _ in range(3):
        answer(engine)
    assert engine.engine.costs is not None
    assert set(engine.engine.costs.load) == {0}
    engine.store.levels()[0].clear()
    prepared_from = prepared(engine, chat())[1]
    assert {c.outcome for c in prepared_from.chunks} == {"hit"}


def test_what_was_recomputed_because_that_was_cheaper_is_brought_near() -> None:
    below = Asked()
    engine, near, memory = tiered(store=below, cost_model=True)
    engine.warm(DOCS)
    near.clear()
    set_costs(engine, forward=1.0, load=10.0)
    assert {c.reason for c in answer(engine).report.chunks} == {"recomputed: cheaper"}
    assert (near.stats().blocks, memory.copied) == (len(DOCS), len(DOCS))
    below.asked.clear()
    answer(engine)
    assert below.asked == [], "it is there"


def test_a_streamed_model_plans_for_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=6)
    nbytes = 1 << 16
    budget = budget_for(tmp_path, 2)
    without = streamed_engine(tmp_path, budget)
    with pytest.raises(CapacityError):
        streamed_engine(tmp_path, budget_for(tmp_path, 0, head=False), store_vram=DeviceStore(nbytes, LateMemory()))
    larger = budget_for(tmp_path, 2)
    object.__setattr__(larger, "vram", budget.vram + nbytes)
    engine = streamed_engine(tmp_path, larger, store_vram=DeviceStore(nbytes, LateMemory()), prefix_bytes=0)
    assert engine.model.kvboost_plan.budget.held == nbytes
    assert engine.model.kvboost_plan.resident == without.model.kvboost_plan.resident
    engine.warm(DOCS[:2])
    assert {c.outcome for c in answer(engine, chat(DOCS[:2])).report.chunks} == {"hit"}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="CUDA"):
        make_engine(store_vram="1GiB")
    with pytest.raises(UsageError, match="not a size"):
        make_engine(store_vram="much")
    with pytest.raises(UsageError, match="without a store"):
        make_engine(store=None, store_vram=DeviceStore(1 << 20, "cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            DeviceStore("2GiB")
    with pytest.raises(UsageError, match="no number of bytes"):
        make_engine(store_vram=1.5)
    assert DeviceStore("2GiB", "cpu").limit_bytes == 2 << 30
    engine, _, _ = tiered()
    assert isinstance(engine.store, DeviceTieredStore)
    with pytest.raises(UsageError, match="already"):
        tiered(store=engine.store)


def test_blocks_may_lie_on_the_device_alone() -> None:
    memory = LateMemory()
    engine = make_engine(store=DeviceStore(1 << 30, memory), **OPTIONS)
    engine.warm(DOCS)
    plain = make_engine(**OPTIONS)
    plain.warm(DOCS)
    assert torch.equal(bits(engine), bits(plain))
    assert (memory.copied, memory.adopted) == (0, len(DOCS))


def test_a_store_without_a_tier_is_left_alone() -> None:
    store: BlockStore = MemoryStore()
    engine = make_engine(store=store, **OPTIONS)
    engine.warm(DOCS)
    assert engine.store is store
    done, _ = prepared(engine, chat())
    assert (done.used.near, done.used.far) == ([], []), "nothing is kept alive during the answer"
