"""Blocks to bytes and back: safetensors bytes with a fixed, bounded header. ``docs/store-format.md`` has the layout.

The container is plain safetensors, so any tool can look inside, but it is written in one canonical form and read by the
small reader below instead of by a general JSON parser. Bytes come from disks and networks and count as hostile: every
length is checked against the buffer before anything is allocated, both checksums cover every byte, and all that is not
exactly a block is a :class:`~kvboost_rag.errors.BlockFormatError`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import torch
import xxhash

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import FORMAT_VERSION, Block, BlockHeader

MAX_HEADER_BYTES = 16 << 20  # the container header, text included
MAX_FIELDS_BYTES = 64 << 10  # the JSON of all other header fields
MAX_TOKENS = 1 << 22
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 14
ALIGNMENT = 64  # bytes; where K and V start, counted from the start of the block

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Buffer = bytes | bytearray | memoryview | mmap

# The checksum of the header stands at a fixed place in it, and counts as zeros while it is computed.
_MAGIC = b'{"__metadata__":{"format":"kvboost_rag/'
_PREFIX = _MAGIC + b'%d","header_checksum":"' % FORMAT_VERSION
_ZEROS = b"0" * 32
_JSON_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_NUMBER = rb"([1-9][0-9]{0,14})"
_REST = re.compile(
    rb'","payload_checksum":"([0-9a-f]{32})","block":(' + _JSON_STRING + rb'),"text":(' + _JSON_STRING + rb")\},"
    rb'"token_ids":\{"dtype":"I32","shape":\[' + _NUMBER + rb'\],"data_offsets":\[0,' + _NUMBER + rb"\]\},"
    rb'"kv":\{"dtype":"(F32|F16|BF16)","shape":\[' + b",".join([_NUMBER, b"2", _NUMBER, _NUMBER, _NUMBER]) + rb"\],"
    rb'"data_offsets":\[' + _NUMBER + b"," + _NUMBER + rb"\]\}\} {0,63}",
    re.DOTALL,
)
_STR_FIELDS = ("fingerprint", "context", "context_kind", "salt", "attention")
_FLOAT_FIELDS = ("created_s", "cost_s")
_FIELDS = {*_STR_FIELDS, *_FLOAT_FIELDS, "tags", "format_version"}


class ForeignBlockError(BlockFormatError):
    """Bytes that were never a block of ours, or are one of a format version that is not read here."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a container header says, checked against the length of its buffer."""

    header: BlockHeader
    payload_checksum: str
    num_tokens: int
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int]
    data_start: int  # bytes; token ids
    kv_start: int  # bytes


def encode_parts(block: Block) -> list[memoryview | bytes]:
    """The bytes of ``block`` as pieces to write one after the other; the tensor's own memory is not copied.

    Raises:
        BlockFormatError: the block cannot be written in this format (dtype, size, header values).
    """
    dtype = _DTYPE_NAMES.get(block.kv.dtype)
    if dtype is None:
        raise BlockFormatError(f"blocks of {block.kv.dtype} cannot be stored", hint=f"store one of {[*DTYPES]}")
    _check_shape(tuple(block.kv.shape))
    kv = _raw(block.kv)
    ids = _pack_ids(block.token_ids)
    payload = xxhash.xxh3_128(ids)
    payload.update(kv)
    container = _container(block, dtype, payload.hexdigest(), len(ids), len(kv))
    return [struct.pack("<Q", len(container)) + container + ids, kv]


def encode_block(block: Block) -> bytes:
    """The bytes of ``block``. Raises like :func:`encode_parts`."""
    return b"".join(encode_parts(block))


def decode_block(buffer: Buffer, *, verify: bool = True) -> Block:
    """The block in ``buffer``, which must hold nothing else.

    A writable buffer (such as a private mapping of a file) is not copied: the tensor is a view of it and keeps it
    alive. A read-only one is copied, since a tensor over it could be written to behind its owner's back.

    Args:
        buffer: the whole block.
        verify: also check the payload's checksum (about 0.1 ms per MB). The header is always checked.

    Raises:
        ForeignBlockError: not a block of ours, or of another format version.
        BlockFormatError: a damaged block.
    """
    view = _as_bytes(buffer)
    layout = _read_layout(view)
    if verify and xxhash.xxh3_128(view[layout.data_start :]).hexdigest() != layout.payload_checksum:
        raise BlockFormatError("payload checksum does not match")
    token_ids = _unpack_ids(view, layout)
    source = bytearray(view[layout.kv_start :]) if view.readonly else view[layout.kv_start :]
    kv = torch.frombuffer(source, dtype=layout.dtype).view(layout.shape)
    return Block(kv=kv, token_ids=token_ids, header=layout.header)


def read_header(buffer: Buffer) -> tuple[BlockHeader, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(header, token ids, shape of K and V, dtype) of the block in ``buffer``, without touching K and V.

    The header's checksum is verified, the payload's (token ids included) is not. Raises like :func:`decode_block`.
    """
    view = _as_bytes(buffer)
    layout = _read_layout(view)
    return layout.header, _unpack_ids(view, layout), layout.shape, layout.dtype


def _raw(kv: torch.Tensor) -> memoryview:
    flat = kv.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _pack_ids(token_ids: tuple[int, ...]) -> bytes:
    if min(token_ids) < 0 or max(token_ids) >= 1 << 31:
        raise BlockFormatError("token ids do not fit int32")
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _container(block: Block, dtype: str, payload: str, ids_bytes: int, kv_bytes: int) -> bytes:
    head = _PREFIX + _ZEROS
    rest = (
        f'","payload_checksum":"{payload}","block":{json.dumps(_fields_json(block.header))},'
        f'"text":{json.dumps(block.header.text)}}},'
        f'"token_ids":{{"dtype":"I32","shape":[{len(block.token_ids)}],"data_offsets":[0,{ids_bytes}]}},'
        f'"kv":{{"dtype":"{dtype}","shape":[{",".join(map(str, block.kv.shape))}],'
        f'"data_offsets":[{ids_bytes},{ids_bytes + kv_bytes}]}}}}'
    ).encode("ascii")
    padding = -(8 + len(head) + len(rest) + ids_bytes) % ALIGNMENT  # so that K and V start aligned
    rest += b" " * padding
    if len(head) + len(rest) > MAX_HEADER_BYTES:
        raise BlockFormatError(f"header larger than {MAX_HEADER_BYTES} bytes", hint="store without text")
    return _PREFIX + _header_checksum(rest) + rest


def _header_checksum(rest: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(_PREFIX + _ZEROS)
    digest.update(rest)
    return digest.hexdigest().encode("ascii")


def _fields_json(header: BlockHeader) -> str:
    if header.format_version != FORMAT_VERSION:
        raise BlockFormatError(f"cannot write format version {header.format_version!r}")
    fields = {name: value for name, value in header.as_dict().items() if name != "text"}
    try:
        fields |= {name: float(getattr(header, name)) for name in _FLOAT_FIELDS}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BlockFormatError(f"header is not plain JSON: {error}") from None
    if len(text) > MAX_FIELDS_BYTES:
        raise BlockFormatError(f"header fields take {len(text)} bytes, at most {MAX_FIELDS_BYTES}", hint="fewer tags")
    return text


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _read_layout(view: memoryview) -> _Layout:
    size = _header_size(view)
    fields = view[8 : 8 + size]
    stated = bytes(fields[len(_PREFIX) : len(_PREFIX) + 32])
    rest = bytes(fields[len(_PREFIX) + 32 :])
    if stated != _header_checksum(rest):
        raise BlockFormatError("header checksum does not match")
    match = _REST.fullmatch(rest)
    if match is None:
        raise BlockFormatError("header is not in canonical form")
    payload, block, text, *_ = match.groups()
    dtype = DTYPES[match[6].decode()]
    num_tokens, ids_end, layers, heads, tokens, head_dim, kv_start, kv_end = (
        int(match[i]) for i in (4, 5, 7, 8, 9, 10, 11, 12)
    )
    shape = (layers, 2, heads, tokens, head_dim)
    _check_shape(shape)
    if (num_tokens, ids_end, kv_start) != (tokens, 4 * tokens, 4 * tokens):
        raise BlockFormatError("token ids and K/V disagree about their size")
    if kv_end - kv_start != math.prod(shape) * dtype.itemsize or 8 + size + kv_end != len(view):
        raise BlockFormatError(f"a block of {8 + size + kv_end} bytes in {len(view)}")
    if (8 + size + kv_start) % ALIGNMENT:
        raise BlockFormatError("K/V are not aligned")
    header = _parse_header(block, text)
    return _Layout(header, payload.decode(), tokens, dtype, shape, 8 + size, 8 + size + kv_start)


def _header_size(view: memoryview) -> int:
    """Bytes of the container header, after what can be told without reading it whole."""
    magic = bytes(view[8 : 8 + len(_PREFIX)])
    if magic != _PREFIX:
        if len(view) < 8 + len(_PREFIX) and _PREFIX.startswith(magic):
            raise BlockFormatError(f"truncated to {len(view)} bytes")
        if magic.startswith(_MAGIC):
            version = magic[len(_MAGIC) :].split(b'"')[0].decode("ascii", "replace")
            raise ForeignBlockError(f"format version {version!r} is not read here", hint=f"known: {FORMAT_VERSION}")
        raise ForeignBlockError("not a block of kvboost_rag")
    (size,) = struct.unpack_from("<Q", view)
    if not len(_PREFIX) + 32 <= size <= MAX_HEADER_BYTES:
        raise BlockFormatError(f"header of {size} bytes, at most {MAX_HEADER_BYTES}")
    if 8 + size > len(view):
        raise BlockFormatError(f"truncated to {len(view)} bytes")
    return int(size)


def _check_shape(shape: tuple[int, ...]) -> None:
    limits = (MAX_LAYERS, 2, MAX_HEADS, MAX_TOKENS, MAX_HEAD_DIM)
    if not all(1 <= n <= limit for n, limit in zip(shape, limits, strict=True)):
        raise BlockFormatError(f"K/V of shape {shape} are outside of 1 to {limits}")


def _unpack_ids(view: memoryview, layout: _Layout) -> tuple[int, ...]:
    token_ids = struct.unpack_from(f"<{layout.num_tokens}i", view, layout.data_start)
    if min(token_ids) < 0:
        raise BlockFormatError("negative token ids")
    return token_ids


def _parse_header(block: bytes, text: bytes) -> BlockHeader:
    try:
        fields = json.loads(_parse_string(block, MAX_FIELDS_BYTES))
    except (ValueError, RecursionError):
        raise BlockFormatError("header fields are not JSON") from None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise BlockFormatError("header fields are not the known ones")
    _check_types(fields)
    fields["tags"] = tuple(fields["tags"])
    return BlockHeader(text=_parse_string(text, MAX_HEADER_BYTES), **fields)


def _parse_string(raw: bytes, limit: int) -> str:
    """The value of a JSON string literal. ``limit`` bounds the value's length."""
    try:
        value = json.loads(raw)
    except ValueError:
        raise BlockFormatError("header holds a malformed string") from None
    if not isinstance(value, str) or len(value) > limit:
        raise BlockFormatError(f"a header string is longer than {limit} characters")
    return value


def _check_types(fields: dict[str, Any]) -> None:
    strings = all(type(fields[name]) is str for name in _STR_FIELDS)
    floats = all(type(fields[name]) is float and math.isfinite(fields[name]) for name in _FLOAT_FIELDS)
    tags = type(fields["tags"]) is list and all(type(tag) is str for tag in fields["tags"])
    if not (strings and floats and tags and fields["format_version"] == FORMAT_VERSION):
        raise BlockFormatError("header fields have the wrong types")
    try:
        "".join(fields[name] for name in _STR_FIELDS).encode()
    except UnicodeEncodeError:  # lone surrogates: no key can be derived from them
        raise BlockFormatError("header fields are not valid text") from None
