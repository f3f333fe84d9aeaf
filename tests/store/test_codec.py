"""The format: round trips, golden bytes, and nothing but BlockFormatError for anything else."""

from __future__ import annotations

import mmap
import re
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv import codec, container
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import ForeignBlockError, LayerReader, decode_block, encode_block, read_header
from kvboost_rag.kv.compress import compress
from tests.store.blocks import make_block, refused_cheaply, same

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def resealed(data: bytes) -> bytes:
    """``data`` with the header checksum that its (changed) header calls for, so that a reader gets past it."""
    (size,) = struct.unpack_from("<Q", data)
    start = container.PREFIX_BYTES
    header = data[8 : 8 + size]
    zeroed = header[:start] + b"0" * 32 + header[start + 32 :]
    return data[: 8 + start] + xxhash.xxh3_128(zeroed).hexdigest().encode() + data[8 + start + 32 :]


def with_header(data: bytes, old: bytes, new: bytes) -> bytes:
    """``data`` with ``old`` replaced in its header, sized and sealed as if it had been written so."""
    (size,) = struct.unpack_from("<Q", data)
    assert old in data[8 : 8 + size]
    header = data[8 : 8 + size].replace(old, new)
    return resealed(struct.pack("<Q", len(header)) + header + data[8 + size :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64])
def test_round_trip(dtype: torch.dtype, tokens: int) -> None:
    block = make_block(1, tokens=tokens, dtype=dtype, text='grüße \u2028 "q" \\', tags=("a", "ü"), salt="s", cost_s=0.5)
    found = decode_block(encode_block(block))
    assert same(found, block)
    assert found.header == block.header


def test_any_safetensors_reader_sees_the_tensors() -> None:
    block = make_block(2, dtype=torch.bfloat16)
    tensors = safetensors.torch.load(encode_block(block))
    assert torch.equal(tensors["kv"], block.kv)
    assert tuple(tensors["token_ids"].tolist()) == block.token_ids


@pytest.mark.parametrize("tokens", range(1, 20))
def test_kv_is_aligned_and_last(tokens: int) -> None:
    block = make_block(3, tokens=tokens)
    data = encode_block(block)
    assert (len(data) - block.nbytes) % codec.ALIGNMENT == 0
    assert data[-block.nbytes :] == block.kv.numpy().tobytes()  # layer after layer


def test_non_contiguous_and_grad_tensors_are_stored_as_they_read() -> None:
    block = make_block(4)
    kv = block.kv.transpose(3, 4).contiguous().transpose(3, 4).requires_grad_()
    assert same(decode_block(encode_block(replace(block, kv=kv))), block)


def test_a_mapped_file_is_not_copied_and_warns_not(tmp_path: Path) -> None:
    block = make_block(5)
    path = tmp_path / "block"
    path.write_bytes(encode_block(block))
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        found = decode_block(mapped)
        frozen = decode_block(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    assert same(found, block)
    assert same(frozen, block)
    mapped[-1] ^= 0xFF  # a private mapping: the block sees it, the file does not
    assert not same(found, block)
    assert same(decode_block(path.read_bytes()), block)


def test_read_header_needs_no_tensor() -> None:
    block = make_block(6, tags=("doc-1",))
    data = bytearray(encode_block(block))
    data[-block.nbytes :] = bytes(block.nbytes)
    assert read_header(data) == (block.header, block.token_ids, tuple(block.kv.shape), torch.float32)
    with pytest.raises(BlockFormatError, match="checksum"):
        decode_block(data)
    assert not decode_block(data, verify=False).kv.any()


def golden(name: str) -> bytes:
    return bytes.fromhex((Path(__file__).parent / f"golden_block_{name}.hex").read_text())


def golden_block() -> Block:
    kv = torch.arange(16, dtype=torch.float32).reshape(2, 2, 1, 2, 2)
    header = replace(make_block(0).header, text="tiny", tags=("t",), created_s=1.5, cost_s=0.25)
    return Block(kv, (7, 11), header)


def test_golden_bytes() -> None:
    block = golden_block()
    assert encode_block(block) == golden("v3")
    found = decode_block(golden("v3"))
    assert same(found, block)
    assert found.header == block.header


def test_blocks_of_version_1_stay_readable() -> None:
    block = golden_block()
    block = replace(block, kv=block.kv[:1])
    found = decode_block(golden("v1"))
    assert same(found, block)
    assert found.header == replace(block.header, format_version=1)
    again = encode_block(found)  # what is handed on is written as of today
    assert again == encode_block(block)
    assert decode_block(again).header == block.header


# -- layer by layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v1", "v2_int8", "v2_int4", "v3", "v3_int8"])
def test_layers_are_those_of_the_block(name: str) -> None:
    data = golden(name)
    block, reader = decode_block(data), LayerReader(data)
    assert (reader.header, reader.token_ids, reader.shape) == (block.header, block.token_ids, tuple(block.kv.shape))
    for index in reversed(range(len(block.kv))):
        assert torch.equal(reader.layer(index), block.kv[index])
    for index in (-1, len(block.kv)):
        with pytest.raises(IndexError):
            reader.layer(index)


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_a_layer_needs_no_byte_of_the_others(compression: str) -> None:
    block = compress(make_block(1, layers=3, tokens=40, head_dim=8), compression)
    data = bytearray(encode_block(block))
    size = (block.nbytes if block.packed is None else block.packed.nbytes) // 3
    data[-size:] = bytes(size)
    reader = LayerReader(data)
    for index in (0, 1):
        assert torch.equal(reader.layer(index), block.kv[index])
    with pytest.raises(BlockFormatError, match="layer 2"):
        reader.layer(2)
    with pytest.raises(BlockFormatError, match="layer 2"):
        decode_block(data)


def test_up_to_version_2_the_first_layer_waits_for_the_last() -> None:
    data = bytearray(golden("v2_int8"))
    data[-1] ^= 1
    with pytest.raises(BlockFormatError, match="checksum"):
        LayerReader(data).layer(0)


def test_layers_are_views_of_a_writable_buffer_and_copies_of_another() -> None:
    block = make_block(5)
    data = bytearray(encode_block(block))
    view, copy = LayerReader(data).layer(1), LayerReader(bytes(data)).layer(1)
    data[-1] ^= 0xFF
    assert torch.equal(copy, block.kv[1])
    assert not torch.equal(view, block.kv[1])


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_no_flipped_byte_gets_through(mask: int) -> None:
    data = bytearray(encode_block(make_block(7, tokens=3, layers=1, text="some text", tags=("x",))))
    for i in range(len(data)):
        data[i] ^= mask
        with pytest.raises(BlockFormatError):
            decode_block(data)
        data[i] ^= mask
    decode_block(data)


def test_no_truncation_or_extension_gets_through() -> None:
    data = encode_block(make_block(8))
    for size in range(len(data)):
        with pytest.raises(BlockFormatError):
            decode_block(data[:size])
    with pytest.raises(BlockFormatError):
        decode_block(data + b"\0")


def test_what_is_not_ours_is_told_from_damage() -> None:
    data = encode_block(make_block(9))
    for other in (b"x" * 1000, safetensors.torch.save({"kv": torch.zeros(3)}), with_header(data, b"rag/3", b"rag/5")):
        with pytest.raises(ForeignBlockError):
            decode_block(other)
    with pytest.raises(BlockFormatError) as caught:
        decode_block(data[: len(data) // 2])
    assert not isinstance(caught.value, ForeignBlockError)


HOSTILE = [
    (b'"shape":[6]', b'"shape":[999999999999]'),
    (b'"shape":[2,2,1,6,4]', b'"shape":[2,2,1,6,999999999999999]'),
    (b'"shape":[2,2,1,6,4]', b'"shape":[2,2,1,12,2]'),
    (b'"shape":[2,2,1,6,4]', b'"shape":[4096,2,4096,6,16384]'),
    (b'"shape":[2,2,1,6,4]', b'"shape":[-2,2,-1,6,4]'),
    (b'"F32"', b'"F64"'),
    (b'"F32"', b'"BF16"'),
    (b'"data_offsets":[24,408]', b'"data_offsets":[0,384]'),
    (b'\\"salt\\":\\"\\"', b'\\"salt\\":\\"\\\\ud800\\"'),
    (b'\\"salt\\":\\"\\"', b'\\"salt\\":7'),
    (b'\\"tags\\":[]', b'\\"tags\\":' + b"[" * 30_000 + b"]" * 30_000),
    (b'\\"tags\\":[]', b'\\"tags\\":[1]'),
    (b'\\"created_s\\":0.0', b'\\"created_s\\":1e999'),
    (b'\\"created_s\\":0.0', b'\\"created_s\\":NaN'),
    (b'\\"format_version\\":3', b'\\"format_version\\":' + b"9" * 5000),
    (b'\\"format_version\\":3', b'\\"format_version\\":1'),
    (b'\\"format_version\\":3', b'\\"extra\\":1,\\"format_version\\":3'),
    (b'\\"compression\\":\\"none\\"', b'\\"compression\\":\\"int9\\"'),
    (b'"layer_checksums":"', b'"layer_checksums":"' + b"0" * 32),
    (b'"layer_checksums":"', b'"layer_checksums":"0'),
    (b'"ids_checksum":"', b'"payload_checksum":"'),
    (b'"block":"{', b'"block":"[{'),
    (b'"text":""', b'"text":"\\x"'),
    (b'"text":""', b'"text":"a\nb"'),
    (b'"text":""', b'"text":"",'),
]


@pytest.mark.parametrize(("old", "new"), HOSTILE)
def test_hostile_headers_with_right_checksums(old: bytes, new: bytes) -> None:
    hostile = with_header(encode_block(make_block(10)), old, new)
    refused_cheaply(hostile)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 1 << 24, 1 << 40, (1 << 63) + 5, (1 << 64) - 1])
def test_hostile_header_sizes(size: int) -> None:
    data = encode_block(make_block(11))
    with pytest.raises(BlockFormatError):
        decode_block(struct.pack("<Q", size) + data[8:])


def test_negative_token_ids_are_refused() -> None:
    block = make_block(12)
    data = bytearray(encode_block(block))
    struct.pack_into("<i", data, len(data) - block.nbytes - 4 * block.num_tokens, -1)
    start = len(data) - block.nbytes - 4 * block.num_tokens
    ids = xxhash.xxh3_128(data[start : start + 4 * block.num_tokens]).hexdigest().encode()
    old = re.search(rb'"ids_checksum":"([0-9a-f]{32})"', data)
    assert old is not None
    with pytest.raises(BlockFormatError, match="negative"):
        decode_block(with_header(bytes(data), old[1], ids))


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    for candidate in (
        data,
        container.PREFIXES[3] + data,
        struct.pack("<Q", container.PREFIX_BYTES + len(data)) + container.PREFIXES[3] + data,
    ):
        with pytest.raises(BlockFormatError):
            decode_block(candidate)


def read_layers(data: bytearray, expected: Block | None) -> None:
    """Read every layer; those that can be read are the expected ones."""
    reader = LayerReader(data)
    for index in range(reader.shape[0]):
        layer = reader.layer(index)
        assert expected is None or torch.equal(layer, expected.kv[index])


@settings(deadline=None, max_examples=300)
@given(st.data(), st.booleans())
def test_mutated_blocks_never_crash_nor_change_contents(data: st.DataObject, seal: bool) -> None:
    block = make_block(13, text="t", tags=("x",))
    good = encode_block(block)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad) - 1))
        cut = data.draw(st.integers(0, 3))
        bad[at : at + cut] = data.draw(st.binary(max_size=4))
    if seal and len(bad) > 200 and bad[:8] == good[:8]:
        bad = bytearray(resealed(bytes(bad)))
    try:
        found = decode_block(bad)
    except BlockFormatError:
        with pytest.raises(BlockFormatError):  # by layers the same, at the latest with the last
            read_layers(bad, None if seal else block)
        return
    assert found.key == found.derive_key()
    assert seal or (same(found, block) and found.header == block.header)  # a forger can say what he likes, damage not


@pytest.mark.parametrize(
    "block",
    [
        make_block(0, dtype=torch.float64),
        make_block(0, dtype=torch.int8),
        make_block(0, tokens=0),
        make_block(0, created_s=float("nan")),
        make_block(0, tags=("x" * 70_000,)),
        make_block(0, text="x" * (17 << 20)),
        make_block(0, format_version=5),
        replace(make_block(0), token_ids=(1 << 31, 1, 2, 3, 4, 5)),
    ],
    ids=["float64", "int8", "empty", "nan", "tags", "text", "version", "ids"],
)
def test_what_the_format_cannot_hold_is_refused_when_writing(block: Block) -> None:
    with pytest.raises(BlockFormatError):
        encode_block(block)


@pytest.mark.parametrize("compression", ["none", "int4"])
def test_what_comes_back_is_bounded_both_ways(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, tokens=64)
    data = encode_block(block if compression == "none" else compress(block, compression))
    monkeypatch.setattr(container, "MAX_KV_BYTES", block.kv.nbytes)
    decode_block(data)
    monkeypatch.setattr(container, "MAX_KV_BYTES", block.kv.nbytes - 1)
    with pytest.raises(BlockFormatError, match="at most"):
        decode_block(data)
    with pytest.raises(BlockFormatError, match="cannot be stored"):
        encode_block(block)
