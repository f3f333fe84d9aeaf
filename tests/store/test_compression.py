"""Blocks in 8 and 4 bits: how far they may be off, what their headers say, and that they never pass for exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import BlockFormatError, UnknownOptionError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import decode_block, encode_block, read_header
from kvboost_rag.kv.compress import compress
from kvboost_rag.kv.packing import layout_of
from kvboost_rag.kv.quantize import pack
from kvboost_rag.store import DiskStore, MemoryStore, TieredStore, open_store
from tests.store.blocks import make_block, refused_cheaply, same
from tests.store.test_codec import golden, with_header

KINDS = ["int8", "int4"]
SHAPES = [(1, 2, 1, 1, 1), (2, 2, 3, 33, 40), (3, 2, 2, 64, 64), (2, 2, 1, 31, 7), (1, 2, 4, 100, 32)]
BITS = {"int8": 8, "int4": 4}


def like_kv(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random K and V, with channels that stand out in K and tokens that do in V, as in models."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape, generator=g)
    kv[:, 0] += 20 * torch.randn(shape[0], shape[2], 1, shape[4], generator=g)
    kv[:, 1] *= 10 * torch.rand(shape[0], shape[2], shape[3], 1, generator=g)
    return kv


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_value_is_within_a_step_of_its_group(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv = like_kv(shape).to(dtype)
    packed = pack(kv, kind)
    assert packed is not None
    found = packed.unpack()
    assert (found.dtype, found.shape) == (dtype, kv.shape)
    exact, off = kv.float(), (found.float() - kv.float()).abs()
    for i, axis in ((0, 2), (1, 3)):  # K: range per channel over tokens; V: per token over channels
        spread = exact[:, i].amax(axis, keepdim=True) - exact[:, i].amin(axis, keepdim=True)
        rounding = torch.finfo(dtype).eps * exact[:, i].abs() + exact[:, i].abs() * 2**-10 + 2**-20
        assert (off[:, i] <= 0.51 * spread / (2 ** BITS[kind] - 1) + rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_unpack_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(like_kv((5, 2, 4, 256, 128)), kind)
    assert packed is not None
    alone = packed.unpack()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(packed.unpack(), alone)


def test_int8_halves_bfloat16_and_int4_is_a_third() -> None:
    for kind, bits in (("int8", 8.4), ("int4", 5.1)):
        layer = layout_of(kind, 8, 512, 128).layer_bytes
        assert 8 * layer / (2 * 8 * 512 * 128) < bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e6])
def test_values_that_do_not_fit_are_stored_exact(kind: str, value: float) -> None:
    block = make_block(1)
    kv = block.kv.clone()
    kv[1, 1, 0, 2, 3] = value
    block = replace(block, kv=kv)
    assert compress(block, kind) is block
    store = MemoryStore(compression=kind)
    store.put(block)
    assert same(store.get(block.key), block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compressed_block_says_so_and_round_trips(kind: str, dtype: torch.dtype) -> None:
    block = make_block(3, tokens=40, head_dim=64, dtype=dtype, tags=("a",), text="t")
    small = compress(block, kind)
    assert small.header == replace(block.header, compression=kind)
    assert small.key == block.key
    data = encode_block(small)
    assert len(data) < len(encode_block(block)) * (0.6 if dtype is torch.bfloat16 else 0.35)
    found = decode_block(data)
    assert same(found, small)
    assert found.header == small.header
    assert encode_block(found) == data  # it can be handed on without another loss
    assert read_header(data) == (small.header, block.token_ids, tuple(block.kv.shape), dtype)
    assert compress(found, kind) is found
    without = replace(found, packed=None)  # as memory gives it back
    again = decode_block(encode_block(without))
    assert same(again, small)
    assert again.header.compression == kind


def golden_block(kind: str) -> Block:
    kv = torch.arange(24, dtype=torch.float32).reshape(1, 2, 1, 3, 4)
    header = replace(make_block(0).header, text="tiny", tags=("t",), created_s=1.5, cost_s=0.25)
    return compress(Block(kv, (7, 11, 13), header), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_bytes(kind: str) -> None:
    assert encode_block(golden_block(kind)) == golden(f"v3_{kind}")
    assert same(decode_block(golden(f"v3_{kind}")), golden_block(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_version_2_stay_readable(kind: str) -> None:
    found = decode_block(golden(f"v2_{kind}"))
    assert same(found, golden_block(kind))
    assert found.header == replace(golden_block(kind).header, format_version=2)
    assert encode_block(found) == golden(f"v3_{kind}")


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_no_flipped_byte_gets_through(mask: int) -> None:
    data = bytearray(encode_block(compress(make_block(7, tokens=3, layers=1), "int4")))
    for i in range(len(data)):
        data[i] ^= mask
        with pytest.raises(BlockFormatError):
            decode_block(data)
        data[i] ^= mask


HOSTILE = [
    (b'"unpacked":"F32,2,1,6,4"', b'"unpacked":"F32,2,1,6,400"'),
    (b'"unpacked":"F32,2,1,6,4"', b'"unpacked":"F32,4096,4096,6,16384"'),
    (b'"unpacked":"F32,2,1,6,4"', b'"unpacked":"F64,2,1,6,4"'),
    (b'"unpacked":"F32,2,1,6,4",', b""),
    (b'"U8"', b'"F32"'),
    (b'\\"compression\\":\\"int8\\"', b'\\"compression\\":\\"none\\"'),
    (b'\\"compression\\":\\"int8\\"', b'\\"compression\\":8'),
    (b'\\"compression\\":\\"int8\\",', b""),
    (b'\\"format_version\\":3', b'\\"format_version\\":1'),
]


@pytest.mark.parametrize(("old", "new"), HOSTILE)
def test_hostile_headers_with_right_checksums(old: bytes, new: bytes) -> None:
    refused_cheaply(with_header(encode_block(compress(make_block(10), "int8")), old, new))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_mutated_blocks_never_crash(data: st.DataObject) -> None:
    good = encode_block(compress(make_block(13), data.draw(st.sampled_from(KINDS))))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        found = decode_block(bad, verify=False)
    except BlockFormatError:
        return
    assert found.header.compression in KINDS


# -- stores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_which_tier_had_it(tmp_path: Path, kind: str) -> None:
    block = make_block(1, tokens=50, head_dim=64, dtype=torch.bfloat16)
    with open_store(tmp_path, compression=kind) as store:
        assert isinstance(store, TieredStore)
        store.put(block)
        found = [tier.get(block.key) for tier in store.tiers]
        assert all(isinstance(one, Block) and one.header.compression == kind for one in found)
        assert isinstance(found[0], Block)
        assert same(found[1], found[0])
        assert not same(found[0], block)
    with open_store(tmp_path) as store:  # another process: the folder remembers, and hits are the same
        assert same(store.get(block.key), found[0])
        assert same(store.get(block.key), found[0])


def test_memory_holds_more_when_it_compresses() -> None:
    blocks = [make_block(i, tokens=64, head_dim=64, dtype=torch.bfloat16) for i in range(4)]
    limit = 2 * blocks[0].nbytes
    plain, small = MemoryStore(limit), MemoryStore(limit, compression="int4")
    for block in blocks:
        assert plain.put(block)
        assert small.put(block)
    assert (plain.stats().blocks, small.stats().blocks) == (2, 4)
    assert small.check() == []


def test_old_exact_blocks_stay_readable_and_exact(tmp_path: Path) -> None:
    block, later = make_block(1), make_block(2)
    with DiskStore(tmp_path) as store:
        store.put(block)
    with DiskStore(tmp_path, compression="int8") as store:
        store.put(later)
        assert same(store.get(block.key), block)
        found = store.get(later.key)
        assert isinstance(found, Block)
        assert found.header.compression == "int8"
        assert store.check() == []


def test_no_such_compression(tmp_path: Path) -> None:
    for spec in ("memory", tmp_path / "x"):
        with pytest.raises(UnknownOptionError):
            open_store(spec, compression="zip")
