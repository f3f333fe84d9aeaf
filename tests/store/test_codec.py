"""The format: round trips, golden bytes, and nothing but BlockFormatError for anything else."""

from __future__ import annotations

import mmap
import re
import struct
import tracemalloc
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
from kvboost_rag.kv import codec
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import ForeignBlockError, decode_block, encode_block, read_header
from tests.store.blocks import make_block, same

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def resealed(data: bytes) -> bytes:
    """``data`` with the header checksum that its (changed) header calls for, so that a reader gets past it."""
    (size,) = struct.unpack_from("<Q", data)
    start = len(codec._PREFIXES[1])
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


def test_golden_bytes() -> None:
    kv = torch.arange(8, dtype=torch.float32).reshape(1, 2, 1, 2, 2)
    base = make_block(0, tokens=2)
    header = replace(base.header, text="tiny", tags=("t",), created_s=1.5, cost_s=0.25)
    block = Block(kv, (7, 11), header)
    golden = bytes.fromhex((Path(__file__).parent / "golden_block_v1.hex").read_text())
    assert encode_block(block) == golden
    found = decode_block(golden)
    assert same(found, block)
    assert found.header == header


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
    for other in (b"x" * 1000, safetensors.torch.save({"kv": torch.zeros(3)}), with_header(data, b"rag/1", b"rag/3")):
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
    (b'\\"format_version\\":1', b'\\"format_version\\":' + b"9" * 5000),
    (b'\\"format_version\\":1', b'\\"format_version\\":2'),
    (b'\\"format_version\\":1', b'\\"extra\\":1,\\"format_version\\":1'),
    (b'"block":"{', b'"block":"[{'),
    (b'"text":""', b'"text":"\\x"'),
    (b'"text":""', b'"text":"a\nb"'),
    (b'"text":""', b'"text":"",'),
]


@pytest.mark.parametrize(("old", "new"), HOSTILE)
def test_hostile_headers_with_right_checksums(old: bytes, new: bytes) -> None:
    hostile = with_header(encode_block(make_block(10)), old, new)
    tracemalloc.start()
    with pytest.raises(BlockFormatError):
        decode_block(hostile)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * len(hostile) + (1 << 20)


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
    payload = xxhash.xxh3_128(data[start:]).hexdigest().encode()
    old = re.search(rb'"payload_checksum":"([0-9a-f]{32})"', data)
    assert old is not None
    with pytest.raises(BlockFormatError, match="negative"):
        decode_block(with_header(bytes(data), old[1], payload))


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    for candidate in (
        data,
        codec._PREFIXES[1] + data,
        struct.pack("<Q", len(codec._PREFIXES[1]) + len(data)) + codec._PREFIXES[1] + data,
    ):
        with pytest.raises(BlockFormatError):
            decode_block(candidate)


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
        make_block(0, format_version=2),
        replace(make_block(0), token_ids=(1 << 31, 1, 2, 3, 4, 5)),
    ],
    ids=["float64", "int8", "empty", "nan", "tags", "text", "version", "ids"],
)
def test_what_the_format_cannot_hold_is_refused_when_writing(block: Block) -> None:
    with pytest.raises(BlockFormatError):
        encode_block(block)
