"""Packed warm-up chunks on a real device. Not run by the tests' usual machine: `make gpu-check`."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import CapacityError
from kvboost_rag.kv.block import Block
from kvboost_rag.model import packed
from kvboost_rag.model.kernels import choose_kernel
from kvboost_rag.model.packed import Segments, choose_packed, one_by_one
from kvboost_rag.model.paged import partial
from kvboost_rag.plan import KVBudget
from kvboost_rag.store import DeviceStore, Miss
from tests.engine.helpers import DOCS, chat, plain_ids, prepared
from tests.engine.slow_store import SlowStore
from tests.paged.helpers import PAGE, least_budget
from tests.store.blocks import make_block
from tests.tiny import save_tiny

pytestmark = pytest.mark.gpu


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Largest difference, relative to the largest value."""
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


def engine_of(path: Path, family: str, dtype: str, **shape: Any) -> KVBoost:
    save_tiny(path, family, **shape)
    return KVBoost.from_pretrained(path, device="cuda", dtype=dtype, store="memory", filler_tokens=48)


def chunks_of(engine: KVBoost) -> list[tuple[int, ...]]:
    ids = plain_ids(engine.tokenizer, " ".join(DOCS) * 4)
    return [tuple(ids[7 * i : 7 * i + n]) for i, n in enumerate((1, 37, 200, 64, 129))]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mqa", "qwen3", "phi3", "yarn"])
def test_packed_blocks_are_those_of_single_chunks(family: str, dtype: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, family, dtype, head_dim=64)
    chunks = chunks_of(engine)
    encoder = engine.encoder()
    assert encoder.packs, "on CUDA it is the default"
    together = encoder.encode(chunks)
    assert engine.adapter.encoded.packed_chunks == len(chunks)
    single = engine.encoder(packs=False)
    for chunk, block in zip(chunks, together, strict=True):
        assert close(
            block.kv, single.encode([chunk])[0].kv, {"float32": 1e-4, "float16": 5e-2, "bfloat16": 1e-1}[dtype]
        )
    other = [*chunks[:2], tuple(reversed(chunks[2])), *chunks[3:]]
    for i, (a, b) in enumerate(zip(together, encoder.encode(other), strict=True)):
        assert torch.equal(a.kv, b.kv) == (i != 2), "a changed chunk changes no bit of another"


def test_a_flash_kernel_packs_where_one_serves() -> None:
    kernel = choose_kernel("auto", torch.device("cuda"), torch.bfloat16, (28, 4), 128)
    found = choose_packed(kernel.name, torch.device("cuda"), torch.bfloat16, (28, 4), 128)
    print(kernel.name, kernel.reason, found.name, found.reason)
    if kernel.name == "sdpa":
        pytest.skip(kernel.reason)
    assert found.name == kernel.name


@pytest.mark.parametrize("name", ["flash-attn", "varlen"])
@pytest.mark.parametrize("heads", [(28, 4), (32, 32), (40, 8)])
def test_flash_over_many_segments(name: str, heads: tuple[int, int]) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    found = choose_packed(name, device, dtype, heads, 128)
    if found.name != name:
        pytest.skip(found.reason)
    lengths, total = (1, 300, 17, 512, 128, 5), 963
    q = torch.randn(total, heads[0], 128, device=device, dtype=dtype).transpose(0, 1)
    q = q.reshape(heads[1], heads[0] // heads[1], total, 128)
    for keys, causal in ((lengths, True), ((264,), False)):
        k, v = (torch.randn(sum(keys), heads[1], 128, device=device, dtype=dtype).transpose(0, 1) for _ in range(2))
        segments = Segments.of(lengths if causal else (total,), keys, device, causal=causal)
        exact = one_by_one(q.float(), k.float(), v.float(), segments, 128**-0.5)
        for a, b in zip(packed._KERNELS[name](q, k, v, segments, 128**-0.5), exact, strict=True):
            assert close(a, b, 2e-2)


def test_the_fused_causal_kernel_is_used() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert partial._fused_is_right(torch.device("cuda"), dtype, "causal")


def test_answers_over_packed_blocks(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2", "bfloat16", head_dim=64)
    report = engine.warm(DOCS)
    assert report.stored == len(DOCS)
    assert engine.adapter.encoded.packed_chunks == len(DOCS)
    assert engine.generate(chat(), max_new_tokens=4).report.hits == len(DOCS)


@pytest.mark.parametrize("paged", [False, True])
def test_blocks_that_come_in_while_the_forward_runs(paged: bool, tmp_path: Path) -> None:
    """Layers are laid by the forward's thread, on its stream, into device memory or pages on both sides."""
    plain = engine_of(tmp_path, "llama", "float32")
    engine = KVBoost.from_pretrained(
        tmp_path, device="cuda", dtype="float32", store=SlowStore(), filler_tokens=48, prefix_bytes=0,
        kv_vram=least_budget(plain) if paged else None,
    )  # fmt: skip
    for e in (plain, engine):
        e.warm(DOCS)
    for repair in ("fast", "balanced", "faithful", Repair.deviation(0.2), Repair.boundary(4).with_shift()):
        ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (engine, plain))
        assert "wait" in ours.report.stages
        assert (ours.report.host_tokens > 0) == paged
        assert ours.logits is not None
        assert theirs.logits is not None
        assert close(ours.logits, theirs.logits, 1e-3), repair


@pytest.mark.parametrize(("dtype", "paged"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_blocks_that_lie_on_the_device(dtype: str, paged: bool, tmp_path: Path) -> None:
    """Kept where they were computed, promoted from below after an answer, and the same answers from either."""
    plain = engine_of(tmp_path, "llama", dtype)
    below, near = SlowStore(), DeviceStore(64 << 20, "cuda")
    engine = KVBoost.from_pretrained(
        tmp_path, device="cuda", dtype=dtype, store=below, filler_tokens=48, prefix_bytes=0, store_vram=near,
        kv_vram=least_budget(plain) if paged else None,
    )  # fmt: skip
    for e in (plain, engine):
        e.warm(DOCS)
    assert near.stats().blocks == len(DOCS), "none of them was looked up"
    for warm in (True, False):
        if not warm:
            near.clear()
            engine.generate(chat(), max_new_tokens=2)
        below.read.clear()
        for key in near.keys():
            block = near.get(key)
            assert not isinstance(block, Miss)
            assert block.kv.device == engine.adapter.spec.device
        for repair in ("fast", "balanced", "faithful"):
            ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (engine, plain))
            assert ours.logits is not None
            assert theirs.logits is not None
            assert close(ours.logits, theirs.logits, 1e-3 if dtype == "float32" else 5e-2), repair
        assert below.read == []
    assert near.stats().blocks == len(DOCS)


real = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs streams and an allocator of a device")


@real
def test_a_size_makes_a_tier_on_the_models_device(tmp_path: Path) -> None:
    engine_of(tmp_path, "llama", "float32").close()
    options: dict[str, Any] = {"device": "cuda", "store": "memory", "filler_tokens": 48, "prefix_bytes": 0}
    with KVBoost.from_pretrained(tmp_path, store_vram="64MiB", **options) as engine:
        near = engine.store.levels()[0]
        assert (near.device, near.stats().limit_bytes) == (engine.adapter.spec.device, 64 << 20)
        engine.warm(DOCS)
        assert engine.generate(chat(), max_new_tokens=2).report.hits == near.stats().hits == len(DOCS)
    with pytest.raises(CapacityError):
        KVBoost.from_pretrained(tmp_path, store_vram="1024GiB", **options)


@real
def test_a_full_device_keeps_nothing_and_goes_on() -> None:
    store, block = DeviceStore(1 << 40, "cuda"), make_block(1, tokens=4096, layers=32, heads=8, head_dim=64)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    try:
        assert not store.put(block)
        assert store.put(make_block(2))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(store.get(block.key), Miss)
    assert (store.stats().blocks, store.stats().skipped_writes) == (1, 1)
    assert store.put(block)


@real
def test_other_streams_wait_for_the_copy_and_their_memory_is_not_given_away() -> None:
    """Put on a stream that is busy, read on another one, deleted at once: what is read is the block."""
    store, side = DeviceStore(1 << 28, "cuda"), torch.cuda.Stream()
    block = make_block(1, tokens=512, layers=8, heads=4, head_dim=64)
    expected = block.kv.cuda()
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            whole = torch.cat([block.kv.cuda(non_blocking=True)] * 2, 3)  # a slice: copied, behind all that
            assert store.put(replace(block, device_kv=whole[:, :, :, :512]))
            del whole
            junk = [torch.full_like(expected, float("nan")) for _ in range(2)]
        found = store.get(block.key)
        assert not isinstance(found, Miss)
        torch.cuda._sleep(20_000_000)
        read = found.kv.clone()
        store.delete(block.key)
        del found, junk
        with torch.cuda.stream(side):
            junk = [torch.full_like(expected, float("nan")) for _ in range(4)]
        assert torch.equal(read, expected)
        del junk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("paged", [False, True])
def test_blocks_that_are_carried_while_the_forward_runs(paged: bool, dtype: str, tmp_path: Path) -> None:
    """From page-locked memory, on the copy stream, into a buffer or pages on both sides."""
    budget = least_budget(engine_of(tmp_path, "llama", dtype))
    options: dict[str, Any] = {"store": "memory", "filler_tokens": 48, "prefix_bytes": 0}
    if paged:
        options["kv_vram"] = KVBudget(8 * budget.nbytes, PAGE)
    plain, ours = (
        KVBoost.from_pretrained(tmp_path, device="cuda", dtype=dtype, carry=way, **options) for way in (False, "auto")
    )
    for e in (plain, ours):
        e.warm(DOCS)
    for repair in ("fast", "balanced", "faithful", Repair.deviation(0.2), Repair.boundary(4).with_shift()):
        a, b = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (ours, plain))
        assert a.logits is not None
        assert b.logits is not None
        assert close(a.logits, b.logits, 1e-5 if dtype == "float32" else 2e-2), repair
        assert a.report.hits == len(DOCS)
    found: Any = ours.stats()["carrier"]
    print(found)
    assert found["bytes_carried"] > 0
    assert plain.stats()["carrier"] is None


def test_blocks_are_page_locked_until_they_are_gone(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "llama", "bfloat16")
    engine.warm(DOCS)
    found: Any = engine.stats()["carrier"]
    if found["pageable_bytes"]:
        pytest.skip("page-locking is refused here")
    block = engine.store.get(next(engine.store.keys()))
    assert isinstance(block, Block)
    assert block.kv.is_pinned()
    address = block.kv.data_ptr()
    del block
    engine.store.clear()
    engine.close()
    gc.collect()
    found = engine.stats()["carrier"]
    assert found["page_locked_bytes"] == 0
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostUnregister(address)) != 0, "it was unlocked before"


def test_blocks_may_be_evicted_behind_a_forward_that_is_only_enqueued(tmp_path: Path) -> None:
    """Their memory goes to others while copies may still be under way."""
    plain = KVBoost.from_pretrained(save_big(tmp_path), device="cuda", dtype="float32", carry=False, **BIG)
    ours = KVBoost.from_pretrained(tmp_path, device="cuda", dtype="float32", **BIG)
    texts = [" ".join(DOCS[i:] + DOCS[:i]) * 4 for i in range(len(DOCS))]
    prompt, theirs = chat(texts), None
    for _ in range(5):
        for e in (plain, ours):
            e.warm(texts)
            got, _ = prepared(e, prompt, repair="fast")
            e.store.clear()  # the host is here long before the device has done it
            e.warm([f"{i} {text}" for i, text in enumerate(texts)])
            theirs, mine = (got.logits, theirs) if e is plain else (theirs, got.logits)
        assert theirs is not None
        assert close(mine, theirs, 1e-5)


BIG: dict[str, Any] = {"store": "memory", "filler_tokens": 48, "prefix_bytes": 0}


def save_big(path: Path) -> Path:
    """Enough KV for copies to take a while."""
    save_tiny(path, "llama", head_dim=128, num_key_value_heads=4, num_hidden_layers=16)
    return path
