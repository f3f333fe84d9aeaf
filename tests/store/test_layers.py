"""Blocks of a store, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import LayerReader, decode_block, encode_block
from kvboost_rag.kv.compress import compress
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store import BlockStore, DiskStore, MemoryStore, Miss, NullStore, TieredStore, open_store
from tests.store.blocks import make_block

BLOCK = make_block(1, layers=4, tokens=64, head_dim=64)  # large enough to be mapped


def opened(kind: str, folder: Path) -> BlockStore:
    return open_store("memory" if kind == "memory" else folder, memory_bytes=0 if kind == "disk" else None)


@pytest.mark.parametrize("kind", ["memory", "disk", "tiered"])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_layers_are_those_of_the_block(kind: str, compression: str, tmp_path: Path) -> None:
    with open_store("memory" if kind == "memory" else tmp_path, compression=compression) as store:
        store.put(BLOCK)
        whole = store.get(BLOCK.key)
        if kind == "disk":
            assert isinstance(store, TieredStore)
            store = store.tiers[1]
        found = store.layers(BLOCK.key)
        assert isinstance(found, LayeredBlock)
        assert not isinstance(whole, Miss)
        assert (found.key, found.header, found.token_ids) == (BLOCK.key, whole.header, BLOCK.token_ids)
        assert (found.num_layers, found.nbytes, found.dtype) == (4, BLOCK.nbytes, torch.float32)
        for index in range(4):
            assert torch.equal(found.layer(index), whole.kv[index])
        for index in (-1, 4):
            with pytest.raises(IndexError):
                found.layer(index)


@pytest.mark.parametrize("kind", ["memory", "disk", "tiered"])
def test_misses_and_hits_are_counted(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        assert store.layers(BLOCK.key) == Miss("absent")
        store.put(BLOCK)
        store.layers(BLOCK.key)
        assert (store.stats().hits, store.stats().misses) == (1, {"absent": 1})
    assert NullStore().layers(BLOCK.key) == Miss("store off")


def test_damage_in_a_later_layer_shows_there_and_sets_the_block_aside(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(BLOCK)
        path = store.files.path(BLOCK.key)
        assert path is not None
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        found = store.layers(BLOCK.key)
        assert isinstance(found, LayeredBlock)
        for index in range(3):
            assert torch.equal(found.layer(index), BLOCK.kv[index])
        with pytest.raises(BlockFormatError, match="layer 3"):
            found.layer(3)
        assert store.get(BLOCK.key) == Miss("absent")
        assert list(store.files.quarantine.iterdir())
        assert store.put(BLOCK)
        assert store.check() == []


@pytest.mark.parametrize("spoil", [b"", b"x" * 5000])
def test_what_is_no_block_is_a_miss(spoil: bytes, tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(BLOCK)
        path = store.files.path(BLOCK.key)
        assert path is not None
        path.write_bytes(spoil)
        found = store.layers(BLOCK.key)
        assert isinstance(found, Miss)
        assert found.reason in ("foreign", "damaged")


def test_another_block_under_the_name_is_a_mismatch(tmp_path: Path) -> None:
    other = make_block(2)
    with DiskStore(tmp_path) as store:
        store.put(BLOCK)
        store.put(other)
        one, two = store.files.path(BLOCK.key), store.files.path(other.key)
        assert one is not None
        assert two is not None
        one.write_bytes(two.read_bytes())
        found = store.layers(BLOCK.key)
        assert isinstance(found, Miss)
        assert found.reason == "mismatch"


def test_the_first_layer_comes_from_a_faster_tier(tmp_path: Path) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path)
    with TieredStore([memory, disk]) as store:
        disk.put(BLOCK)
        assert isinstance(store.layers(BLOCK.key), LayeredBlock)
        assert (memory.stats().blocks, disk.stats().hits) == (0, 1)
        memory.put(BLOCK)
        store.layers(BLOCK.key)
        assert (memory.stats().hits, disk.stats().hits) == (1, 1)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_a_layer_that_was_handed_out_is_not_written_again(compression: str, framed: bool, ahead: bool) -> None:
    """Layers are read by several threads, and what is unpacked passes through values that are not right yet."""
    if framed:
        pytest.importorskip("zstandard", reason="zstandard is not installed (extra [zstd])")
    kv = torch.arange(BLOCK.kv.numel()).reshape(BLOCK.kv.shape) % 97 / 50  # so that frames pay
    data = encode_block(compress(Block(kv, BLOCK.token_ids, BLOCK.header), compression), framed=framed)
    reader, whole = LayerReader(data, ahead=ahead), decode_block(data)
    assert torch.equal(reader.layer(2), whole.kv[2])
    reader.kv[2] = -1.0  # what another writing would change
    for index in (0, 1, 2, 3):
        reader.read(index)
    assert torch.equal(reader.kv[2], torch.full_like(reader.kv[2], -1.0))
    for index in (0, 1, 3):
        assert torch.equal(reader.kv[index], whole.kv[index])
