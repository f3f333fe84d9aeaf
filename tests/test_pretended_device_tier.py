"""The store's tier on a GPU that is not there: what lies on it crosses the bus no more, and no operation mixes devices."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.errors import CapacityError
from kvboost_rag.kv.block import Block
from kvboost_rag.plan import KVBudget
from kvboost_rag.store import DeviceStore, MemoryStore
from tests.engine.helpers import DOCS, chat
from tests.engine.slow_store import SlowStore
from tests.pretend import GPU, PretendTensor, pretend_gpu
from tests.store.blocks import make_block
from tests.test_pretended_gpu import POLICIES, engine, logits


def near_of(made: KVBoost) -> DeviceStore:
    near = made.store.levels()[0]
    assert isinstance(near, DeviceStore)
    assert near.device == GPU
    return near


def kv_bytes(made: KVBoost) -> int:
    return sum(block.nbytes for key in made.store.keys() if isinstance(block := made.store.get(key), Block))


@pytest.mark.parametrize("family", ["llama", "yarn"])
def test_answers_are_those_of_a_cpu(family: str) -> None:
    plain = engine(family)
    with pretend_gpu():
        ours = engine(family, on_gpu=True, store_vram="64MiB")
        near = near_of(ours)
        assert near.stats().blocks == len(DOCS)
        assert all(isinstance(block.kv, PretendTensor) for k in near.keys() if isinstance(block := near.get(k), Block))
        for repair in POLICIES:
            assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-4, repair


@pytest.mark.parametrize("packs", [False, True])
def test_what_was_computed_there_does_not_come_back_over_the_bus(packs: bool) -> None:
    with pretend_gpu() as seen:
        ours = engine(on_gpu=True, store_vram="64MiB")
        ours.store.clear()
        ours.warm(DOCS, packs=packs)
        seen.to_device = 0
        ours.warm(["Another text, which makes the round trip no more than the others did."], packs=packs)
        rest = seen.to_device
        assert near_of(ours).stats().blocks == len(DOCS) + 1
        assert rest < kv_bytes(ours) // (len(DOCS) + 1) // 4, "token ids and positions"


@pytest.mark.parametrize("repair", ["fast", "balanced"])
def test_a_hit_on_the_device_crosses_no_bus(repair: str) -> None:
    with pretend_gpu() as seen:
        crossed = {}
        for vram in (None, "64MiB"):
            ours = engine(on_gpu=True, store_vram=vram)
            total = kv_bytes(ours)
            logits(ours, repair)
            seen.to_device = 0
            logits(ours, repair)
            crossed[vram] = seen.to_device
        assert total <= crossed[None] - crossed["64MiB"] < 1.1 * total, "the blocks, and little else"


def test_each_block_is_promoted_by_one_copy_after_the_answer() -> None:
    with pretend_gpu() as seen:
        ours = engine(on_gpu=True, store_vram="64MiB")
        near, total = near_of(ours), kv_bytes(ours)
        ours.generate(chat(), max_new_tokens=2)
        seen.to_device = 0
        ours.generate(chat(), max_new_tokens=2)
        rest = seen.to_device
        near.clear()
        seen.to_device = 0
        pieces = ours.stream(chat(), max_new_tokens=2)
        next(pieces)
        before = seen.to_device
        assert before < 1.1 * total + rest
        list(pieces)
        assert total <= seen.to_device - before <= total + rest
        assert near.stats().blocks == len(DOCS)


def test_the_host_waits_no_more_often_than_without() -> None:
    with pretend_gpu() as seen:
        counts = []
        for vram in (None, "64MiB"):
            ours = engine(on_gpu=True, store_vram=vram)
            logits(ours, "fast")
            seen.waits.clear()
            logits(ours, "fast")
            counts.append(seen.waits.total())
        assert counts[1] <= counts[0]


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_rounded_blocks(compression: str) -> None:
    with pretend_gpu():
        plain, ours = (engine(on_gpu=True, store_vram=vram, compression=compression) for vram in (None, "64MiB"))
        assert near_of(ours).stats().blocks == len(DOCS)
        assert torch.equal(logits(ours, "fast"), logits(plain, "fast"))


def test_pages_on_both_sides_and_arriving_blocks() -> None:
    plain = engine()
    with pretend_gpu():
        per_token = plain.adapter.spec.bytes_per_token
        budget: Any = KVBudget(64 * per_token, page_tokens=8)
        ours = engine(on_gpu=True, store=SlowStore(), store_vram="64MiB", kv_vram=budget)
        near = near_of(ours)
        for warm in (True, False):
            if not warm:
                near.clear()
                ours.generate(chat(), max_new_tokens=2)
                assert near.stats().blocks == len(DOCS)
            score = ours.score(chat(), [40, 50, 60], repair="fast", logits=True)
            assert score.report.host_tokens > 0
            assert score.logits is not None
            assert (score.logits.cpu() - logits(plain, "fast")).abs().max() < 1e-3
        del ours
        gc.collect()  # its memory is unlocked while there is a device


def test_more_than_the_device_has_is_refused() -> None:
    with pretend_gpu(), pytest.raises(CapacityError, match="80"):
        engine(on_gpu=True, store=MemoryStore(), store_vram="81GiB")


def test_a_block_of_the_users_own_is_copied_there() -> None:
    with pretend_gpu():
        store = DeviceStore(1 << 20)
        block = make_block(1, tokens=3, heads=2)
        assert store.put(block)
        found = store.get(block.key)
        assert isinstance(found, Block)
        assert found.kv.device == GPU
        assert torch.equal(found.kv.cpu(), block.kv)
