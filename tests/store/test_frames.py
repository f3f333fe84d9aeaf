"""Blocks in zstd frames: exact, bounded, and misses with a reason where the library is not installed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import BlockFormatError, MissingExtraError, UnknownOptionError, UsageError
from kvboost_rag.kv import frames
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.choice import CHOICES, parse_compression
from kvboost_rag.kv.codec import LayerReader, decode_block, encode_block, read_header
from kvboost_rag.kv.compress import compress
from kvboost_rag.store import DiskStore, MemoryStore, Miss, RemoteStore, TieredStore, open_store
from tests.store.blocks import make_block, refused_cheaply, same
from tests.store.test_codec import golden, with_header
from tests.store.test_remote import Shelf

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
ROUNDINGS = ["none", "int8", "int4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def smooth(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16, tokens: int = 48, **more: object) -> Block:
    """A block whose exponents are alike, as a model's are: it shrinks."""
    block = make_block(seed, tokens=tokens, head_dim=16, dtype=torch.float32, **more)  # type: ignore[arg-type]
    return replace(block, kv=(2 + block.kv.clamp(-1, 1)).to(dtype))


def framed(block: Block) -> bytes:
    data = encode_block(block, framed=True)
    assert b"kvboost_rag/4" in data[:64]
    return data


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where zstandard is not installed."""

    def missing() -> None:
        raise ImportError("No module named 'zstandard'")

    monkeypatch.setattr(frames, "_zstandard", missing)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(rounding: str, dtype: torch.dtype) -> None:
    block = compress(smooth(dtype=dtype, text="t", tags=("a",), salt="s"), rounding)
    data = framed(block)
    assert len(data) < len(encode_block(block))
    found, reader = decode_block(data), LayerReader(data)
    assert same(found, block)
    assert replace(found.header, format_version=3) == block.header
    assert read_header(data)[1:] == (block.token_ids, tuple(block.kv.shape), dtype)
    for index in reversed(range(len(block.kv))):
        assert torch.equal(reader.layer(index), block.kv[index])
    assert encode_block(found) == encode_block(block)  # handed on without frames, nothing is lost
    assert framed(found) == data


def test_a_block_that_was_rounded_and_lost_its_codes_still_comes_back() -> None:
    block = replace(compress(smooth(), "int8"), packed=None)
    found = decode_block(framed(block))
    assert same(found, block)
    assert found.header.compression == "int8"


def test_several_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    block = smooth(layers=5, tokens=64 * 64, heads=2)
    alone = framed(block)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert framed(block) == alone
    assert same(decode_block(alone), block)


def test_any_safetensors_reader_sees_the_frames() -> None:
    import safetensors.torch

    block = smooth()
    raw = safetensors.torch.load(framed(block))["kv"].numpy().tobytes()
    first = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    planes = torch.frombuffer(bytearray(first), dtype=torch.uint8).view(2, -1)
    assert torch.equal(planes.T.contiguous().view(torch.bfloat16).view(block.kv.shape[1:]), block.kv[0])


@pytest.mark.parametrize("most", [1, 1 << 31], ids=["a bomb", "noise"])
def test_what_would_shrink_too_far_or_not_at_all_is_written_plain(most: int) -> None:
    block = make_block(1, tokens=64)
    block = replace(block, kv=torch.randint(most, block.kv.shape, dtype=torch.int32).view(torch.float32))
    assert encode_block(block, framed=True) == encode_block(block)


def test_golden_bytes_stay_readable() -> None:
    """The frames' bytes are zstd's own affair and may change with it; what was written must be read."""
    block = smooth(7, tokens=16, layers=1, text="tiny", tags=("t",), created_s=1.5, cost_s=0.25)
    found = decode_block(golden("v4"))
    assert same(found, block)
    assert found.header == replace(block.header, format_version=4)


# -- damage and hostility ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["none", "int8"])
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_no_flipped_byte_gets_through(rounding: str, mask: int) -> None:
    data = bytearray(framed(compress(smooth(tokens=32, layers=1), rounding)))
    for i in range(len(data)):
        data[i] ^= mask
        with pytest.raises(BlockFormatError):
            decode_block(data)
        data[i] ^= mask
    decode_block(data)


def test_no_truncation_or_extension_gets_through() -> None:
    data = framed(smooth(tokens=32))
    for size in range(len(data)):
        with pytest.raises(BlockFormatError):
            decode_block(data[:size])
    with pytest.raises(BlockFormatError):
        decode_block(data + b"\0")


def test_a_layer_needs_no_byte_of_the_others() -> None:
    block = smooth(layers=3)
    data = bytearray(framed(block))
    data[-4:] = bytes(4)
    reader = LayerReader(data)
    for index in (0, 1):
        assert torch.equal(reader.layer(index), block.kv[index])
    with pytest.raises(BlockFormatError, match="layer 2"):
        reader.layer(2)


def forged(block: Block, frame: bytes) -> bytes:
    """A framed block of one layer with another frame in it, and all the checksums that this calls for."""
    good = framed(block)
    (size,) = struct.unpack_from("<Q", good)
    old = good[8 + size + 4 * block.num_tokens :]
    data = good[: -len(old)] + frame
    start = 4 * block.num_tokens
    for was, becomes in (
        (xxhash.xxh3_128_hexdigest(old), xxhash.xxh3_128_hexdigest(frame)),
        (f",{len(old)}" + '"', f",{len(frame)}" + '"'),
        (f'"shape":[{len(old)}]', f'"shape":[{len(frame)}]'),
        (f"[{start},{start + len(old)}]", f"[{start},{start + len(frame)}]"),
    ):
        data = with_header(data, was.encode(), becomes.encode())
    return data


def test_a_forger_may_say_what_he_likes_as_long_as_it_fits() -> None:
    block = smooth(layers=1)
    size = block.nbytes
    frame = zstandard.ZstdCompressor().compress((bytes(range(256)) * size)[:size])
    padded = zstandard.ZstdCompressor(level=1).compress(
        torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().tobytes()
    )
    assert len(frame) * frames.MAX_EXPANSION < size
    with pytest.raises(BlockFormatError, match="times as many"):
        decode_block(forged(block, frame))
    decode_block(forged(block, padded))


def hostile_frames(size: int) -> Iterator[tuple[str, bytes]]:
    noise = torch.randint(0, 255, (2 * size,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    raw = noise.numpy().tobytes()
    one = zstandard.ZstdCompressor(level=1)
    good = one.compress(raw[:size])
    yield "shorter", one.compress(raw[: size - 1])
    yield "longer", one.compress(raw[: size + 1])
    yield "no size", zstandard.ZstdCompressor(level=1, write_content_size=False).compress(raw[:size])
    yield "two frames", one.compress(raw[: size // 2]) + one.compress(raw[size // 2 : size])
    yield "bytes behind", good + b"\0" * 8
    yield "truncated", good[:-1]
    yield "no frame", raw[: size // 2]
    yield "skippable", b"\x50\x2a\x4d\x18" + struct.pack("<I", size) + raw[:size]
    yield "a bomb", one.compress(bytes(1 << 28)) + raw[: size // 2]
    # claims 2^62 bytes in a window of 2^62: magic, descriptor (8-byte size, single segment), size, then anything
    yield "a huge claim", b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 1 << 62) + raw[: size // 2]
    # the right size, but a window of 2^41 bytes (no single segment, window descriptor 0xF8)
    yield "a huge window", b"\x28\xb5\x2f\xfd" + bytes([0x80, 0xF8]) + struct.pack("<I", size) + raw[: size // 2]


@pytest.mark.parametrize("name", [name for name, _ in hostile_frames(4096)])
def test_hostile_frames_with_right_checksums(name: str) -> None:
    block = smooth(layers=1)
    refused_cheaply(forged(block, dict(hostile_frames(block.nbytes))[name]))


HOSTILE = [
    (rb'"zstd":"BF16,', b'"zstd":"F16,'),
    (rb'"zstd":"BF16,', b'"zstd":"U8,'),
    (rb'"zstd":"BF16,', b'"zstd":"BF16,1,'),
    (rb'"zstd":"BF16,\d+', b'"zstd":"BF16,1'),
    (rb'"zstd":"BF16,\d+', b'"zstd":"BF16,999999999999999'),
    (rb'"zstd":"BF16,\d+', b'"zstd":"BF16,'),
    (rb'"zstd":"BF16,\d+', b'"zstd":"BF16,-5'),
    (rb'"unpacked":"BF16,2,1,48,16"', b'"unpacked":"F32,2,1,48,16"'),
    (rb'"unpacked":"BF16,2,1,48,16"', b'"unpacked":"BF16,2,1,48,16384"'),
    (rb'"unpacked":"BF16,2,1,48,16"', b'"unpacked":"BF16,4096,4096,48,16384"'),
    (rb'"unpacked":"BF16,2,1,48,16",', b""),
    (rb'"zstd":"BF16,\d+,\d+",', b""),
    (rb"kvboost_rag/4", b"kvboost_rag/3"),
    (rb'\\"format_version\\":4', rb"\"format_version\":3"),
]


@pytest.mark.parametrize(("old", "new"), HOSTILE)
def test_hostile_headers_with_right_checksums(old: bytes, new: bytes) -> None:
    data = framed(smooth())
    match = re.search(old, data)
    assert match is not None
    hostile = with_header(data, match[0], new)
    refused_cheaply(hostile)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_mutated_blocks_never_crash(data: st.DataObject) -> None:
    good = framed(compress(smooth(13), data.draw(st.sampled_from(ROUNDINGS))))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len(bad) // 3, len(bad) - 1))
        bad[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        decode_block(bad, verify=False)  # past the checksums: what is left is zstd's own and ours
    except BlockFormatError:
        return


# -- stores ------------------------------------------------------------------------------------------------------------


def test_choices_are_taken_apart_and_put_together() -> None:
    assert [str(parse_compression(name)) for name in CHOICES] == [*CHOICES]
    assert [parse_compression(name).rounding for name in ("zstd", "int8+zstd", "int4")] == ["none", "int8", "int4"]
    for name in ("zip", "+zstd", "none+zstd", "int8+", ""):
        with pytest.raises(UnknownOptionError):
            parse_compression(name)


@pytest.mark.parametrize("compression", ["zstd", "int8+zstd"])
def test_every_tier_gives_the_same_and_zstd_is_exact(compression: str, tmp_path: Path) -> None:
    block = smooth(1)
    with open_store(tmp_path, compression=compression) as store:
        assert isinstance(store, TieredStore)
        store.put(block)
        found = [tier.get(block.key) for tier in store.tiers]
        assert isinstance(found[0], Block)
        assert same(found[1], found[0])
        assert same(found[0], block) == (compression == "zstd")
        assert found[0].header.compression == ("none" if compression == "zstd" else "int8")
        assert store.stats().compression == compression
    with DiskStore(tmp_path) as disk:  # the folder remembers
        disk.put(smooth(2))
        assert disk.stats().compression == compression
        assert disk.check() == []
        sizes = [path.stat().st_size for path in disk.files.walk()]
        assert all(size < len(encode_block(compress(block, disk.compression))) for size in sizes)
        layered = disk.layers(block.key)
        assert not isinstance(layered, Miss)
        assert torch.equal(layered.layer(1), found[0].kv[1])


def test_an_exact_block_says_nothing_of_its_frames(tmp_path: Path) -> None:
    block = smooth(1)
    with DiskStore(tmp_path, compression="zstd") as store:
        store.put(block)
        found = store.get(block.key)
        assert isinstance(found, Block)
        assert found.header.compression == "none"


def test_a_damaged_frame_is_a_miss_and_set_aside(tmp_path: Path) -> None:
    block = smooth(1)
    with DiskStore(tmp_path, compression="zstd") as store:
        store.put(block)
        (path,) = store.files.walk()
        path.write_bytes(path.read_bytes()[:-1])
        found = store.get(block.key)
        assert isinstance(found, Miss)
        assert found.reason == "damaged"
        assert not path.exists()
        assert store.put(block)
        assert same(store.get(block.key), block)


@pytest.mark.usefixtures("without")
def test_without_the_library_asking_for_it_is_an_error_with_the_command(tmp_path: Path) -> None:
    for spec in (tmp_path / "kv", f"file://{tmp_path}/objects"):
        with pytest.raises(MissingExtraError, match=r"pip install 'kvboost-rag\[zstd\]'"):
            open_store(spec, compression="zstd")
    assert not (tmp_path / "kv").exists()


def test_without_the_library_blocks_are_misses_that_name_the_command(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    block, other = smooth(1), smooth(2)
    with DiskStore(tmp_path, compression="zstd") as store:
        store.put(block)
    request.getfixturevalue("without")
    with DiskStore(tmp_path) as store:
        assert "pip install" in caplog.text
        for found in (store.get(block.key), store.layers(block.key), store.open_many([block.key])[0]):
            assert isinstance(found, Miss)
            assert found.reason == "unavailable"
            assert "pip install 'kvboost-rag[zstd]'" in found.detail
        assert store.put(other)  # plainly
        assert same(store.get(other.key), other)
        assert [(p.kind, p.fixed) for p in store.check(fix=True)] == [("unavailable", False)]
        assert store.contains(block.key)
    request.getfixturevalue("monkeypatch").undo()
    with DiskStore(tmp_path) as store:  # nothing was lost, and the setting is still there
        assert same(store.get(block.key), block)
        assert store.stats().compression == "zstd"


def test_without_the_library_a_server_s_blocks_stay_there(request: pytest.FixtureRequest) -> None:
    shelf, block = Shelf(), smooth(1)
    with RemoteStore(shelf, compression="zstd") as store:
        store.put(block)
    request.getfixturevalue("without")
    with RemoteStore(shelf) as store:
        for found in (store.get(block.key), store.open_many([block.key])[0]):
            assert isinstance(found, Miss)
            assert found.reason == "unavailable"
            assert "pip install" in found.detail
        assert store.contains(block.key)


def test_memory_takes_no_zstd() -> None:
    for make in (lambda: MemoryStore(compression="zstd"), lambda: open_store("memory", compression="int8+zstd")):
        with pytest.raises(UsageError, match="zstd"):
            make()
