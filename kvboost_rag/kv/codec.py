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

import torch
import xxhash

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import COMPRESSED_VERSION, Block, BlockHeader
from kvboost_rag.kv.compress import unpacked
from kvboost_rag.kv.fields import MAX_FIELDS_BYTES, VERSIONS, read_fields, write_fields
from kvboost_rag.kv.quantize import Packed, layout_of

MAX_HEADER_BYTES = 16 << 20  # the container header, text included
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
_PREFIXES = {version: _MAGIC + b'%d","header_checksum":"' % version for version in VERSIONS}
_PREFIX_BYTES = len(_PREFIXES[1])
_ZEROS = b"0" * 32
_JSON_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_NUMBER = rb"([1-9][0-9]{0,14})"
_OFFSETS = rb'"data_offsets":\[' + _NUMBER + b"," + _NUMBER + rb"\]\}\} {0,63}"
_BEFORE_KV = (
    rb'","payload_checksum":"([0-9a-f]{32})","block":(' + _JSON_STRING + rb'),"text":(' + _JSON_STRING + rb")\},"
    rb'"token_ids":\{"dtype":"I32","shape":\[' + _NUMBER + rb'\],"data_offsets":\[0,' + _NUMBER + rb"\]\},"
)
# K and V as they are, and compressed: bytes of [layers, bytes per layer], with the shape and dtype that come back.
_PLAIN = re.compile(
    _BEFORE_KV + rb'"kv":\{"dtype":"(F32|F16|BF16)","shape":\['
    + b",".join([_NUMBER, b"2", _NUMBER, _NUMBER, _NUMBER]) + rb"\]," + _OFFSETS,
    re.DOTALL,
)  # fmt: skip
_PACKED = re.compile(
    rb'","unpacked":"(F32|F16|BF16),' + b",".join([_NUMBER, _NUMBER, _NUMBER, _NUMBER])
    + _BEFORE_KV + rb'"kv":\{"dtype":"U8","shape":\[' + _NUMBER + b"," + _NUMBER + rb"\]," + _OFFSETS,
    re.DOTALL,
)  # fmt: skip


class ForeignBlockError(BlockFormatError):
    """Bytes that were never a block of ours, or are one of a format version that is not read here."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a container header says, checked against the length of its buffer."""

    header: BlockHeader
    payload_checksum: str
    num_tokens: int
    dtype: torch.dtype  # of the tensor that comes back
    shape: tuple[int, int, int, int, int]  # likewise
    packed: bool
    data_start: int  # bytes; token ids
    kv_start: int  # bytes


def encode_parts(block: Block) -> list[memoryview | bytes]:
    """The bytes of ``block`` as pieces to write one after the other; the tensor's own memory is not copied. A block
    with a compressed form (``block.packed``) is written in that form.

    Raises:
        BlockFormatError: the block cannot be written in this format (dtype, size, header values).
    """
    if _DTYPE_NAMES.get(block.kv.dtype) is None:
        raise BlockFormatError(f"blocks of {block.kv.dtype} cannot be stored", hint=f"store one of {[*DTYPES]}")
    _check_shape(tuple(block.kv.shape))
    kv = _raw(block.kv if block.packed is None else block.packed.data)
    ids = _pack_ids(block.token_ids)
    payload = xxhash.xxh3_128(ids)
    payload.update(kv)
    container = _container(block, payload.hexdigest(), len(ids), len(kv))
    return [struct.pack("<Q", len(container)) + container + ids, kv]


def encode_block(block: Block) -> bytes:
    """The bytes of ``block``. Raises like :func:`encode_parts`."""
    return b"".join(encode_parts(block))


def decode_block(buffer: Buffer, *, verify: bool = True) -> Block:
    """The block in ``buffer``, which must hold nothing else.

    A writable buffer (such as a private mapping of a file) is not copied: the tensor is a view of it and keeps it
    alive. A read-only one is copied, since a tensor over it could be written to behind its owner's back. K and V of a
    compressed block are unpacked into memory of their own, in the dtype that they had.

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
    if not layout.packed:
        kv = torch.frombuffer(source, dtype=layout.dtype).view(layout.shape)
        return Block(kv=kv, token_ids=token_ids, header=layout.header)
    layers, _, heads, tokens, head_dim = layout.shape
    data = torch.frombuffer(source, dtype=torch.uint8).view(layers, -1)
    packed = Packed(layout.header.compression, data, layout.dtype, heads, tokens, head_dim)
    return unpacked(packed, token_ids, layout.header)


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


def _container(block: Block, payload: str, ids_bytes: int, kv_bytes: int) -> bytes:
    fields, text = json.dumps(write_fields(block.header)), json.dumps(block.header.text)
    prefix = _PREFIXES[block.header.format_version]
    dtype, shape, unpacked_as = _DTYPE_NAMES[block.kv.dtype], ",".join(map(str, block.kv.shape)), ""
    if block.packed is not None:
        layers, _, heads, tokens, head_dim = block.packed.shape
        unpacked_as = f'","unpacked":"{_DTYPE_NAMES[block.packed.dtype]},{layers},{heads},{tokens},{head_dim}'
        dtype, shape = "U8", ",".join(map(str, block.packed.data.shape))
    rest = (
        f'{unpacked_as}","payload_checksum":"{payload}","block":{fields},"text":{text}}},'
        f'"token_ids":{{"dtype":"I32","shape":[{len(block.token_ids)}],"data_offsets":[0,{ids_bytes}]}},'
        f'"kv":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{ids_bytes},{ids_bytes + kv_bytes}]}}}}'
    ).encode("ascii")
    padding = -(8 + len(prefix) + 32 + len(rest) + ids_bytes) % ALIGNMENT  # so that K and V start aligned
    rest += b" " * padding
    if len(prefix) + 32 + len(rest) > MAX_HEADER_BYTES:
        raise BlockFormatError(f"header larger than {MAX_HEADER_BYTES} bytes", hint="store without text")
    return prefix + _header_checksum(prefix, rest) + rest


def _header_checksum(prefix: bytes, rest: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(prefix + _ZEROS)
    digest.update(rest)
    return digest.hexdigest().encode("ascii")


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _read_layout(view: memoryview) -> _Layout:
    version, size = _head(view)
    prefix = _PREFIXES[version]
    fields = view[8 : 8 + size]
    stated = bytes(fields[len(prefix) : len(prefix) + 32])
    rest = bytes(fields[len(prefix) + 32 :])
    if stated != _header_checksum(prefix, rest):
        raise BlockFormatError("header checksum does not match")
    plain = _PLAIN.fullmatch(rest)
    packed = _PACKED.fullmatch(rest) if plain is None and version == COMPRESSED_VERSION else None
    match = plain or packed
    if match is None:
        raise BlockFormatError("header is not in canonical form")
    if packed:
        dtype, layers, heads, tokens, head_dim, payload, block, text, num_tokens, ids_end, *sizes = match.groups()
    else:
        payload, block, text, num_tokens, ids_end, dtype, layers, heads, tokens, head_dim, *sizes = match.groups()
    shape = (int(layers), 2, int(heads), int(tokens), int(head_dim))
    _check_shape(shape)
    *rows, kv_start, kv_end = map(int, sizes)
    if (int(num_tokens), int(ids_end), kv_start) != (shape[3], 4 * shape[3], 4 * shape[3]):
        raise BlockFormatError("token ids and K/V disagree about their size")
    header = BlockHeader(
        text=_parse_string(text, MAX_HEADER_BYTES), **read_fields(_parse_string(block, MAX_FIELDS_BYTES), version)
    )
    kv_bytes = math.prod(shape) * DTYPES[dtype.decode()].itemsize
    if packed:
        layer_bytes = layout_of(header.compression, *shape[2:]).layer_bytes
        kv_bytes = shape[0] * layer_bytes
        if rows != [shape[0], layer_bytes]:
            raise BlockFormatError("a compressed block of another size than its shape calls for")
    if kv_end - kv_start != kv_bytes or 8 + size + kv_end != len(view):
        raise BlockFormatError(f"a block of {8 + size + kv_end} bytes in {len(view)}")
    if (8 + size + kv_start) % ALIGNMENT:
        raise BlockFormatError("K/V are not aligned")
    start = 8 + size
    return _Layout(
        header, payload.decode(), shape[3], DTYPES[dtype.decode()], shape, bool(packed), start, start + kv_start
    )


def _head(view: memoryview) -> tuple[int, int]:
    """(format version, bytes of the container header), after what can be told without reading it whole."""
    magic = bytes(view[8 : 8 + _PREFIX_BYTES])
    version = next((number for number, prefix in _PREFIXES.items() if magic == prefix), None)
    if version is None:
        if len(view) < 8 + _PREFIX_BYTES and any(prefix.startswith(magic) for prefix in _PREFIXES.values()):
            raise BlockFormatError(f"truncated to {len(view)} bytes")
        if magic.startswith(_MAGIC):
            stated = magic[len(_MAGIC) :].split(b'"')[0].decode("ascii", "replace")
            raise ForeignBlockError(f"format version {stated!r} is not read here", hint=f"known: {VERSIONS}")
        raise ForeignBlockError("not a block of kvboost_rag")
    (size,) = struct.unpack_from("<Q", view)
    if not _PREFIX_BYTES + 32 <= size <= MAX_HEADER_BYTES:
        raise BlockFormatError(f"header of {size} bytes, at most {MAX_HEADER_BYTES}")
    if 8 + size > len(view):
        raise BlockFormatError(f"truncated to {len(view)} bytes")
    return version, int(size)


def _check_shape(shape: tuple[int, ...]) -> None:
    limits = (MAX_LAYERS, 2, MAX_HEADS, MAX_TOKENS, MAX_HEAD_DIM)
    if not all(1 <= n <= limit for n, limit in zip(shape, limits, strict=True)):
        raise BlockFormatError(f"K/V of shape {shape} are outside of 1 to {limits}")


def _unpack_ids(view: memoryview, layout: _Layout) -> tuple[int, ...]:
    token_ids = struct.unpack_from(f"<{layout.num_tokens}i", view, layout.data_start)
    if min(token_ids) < 0:
        raise BlockFormatError("negative token ids")
    return token_ids


def _parse_string(raw: bytes, limit: int) -> str:
    """The value of a JSON string literal. ``limit`` bounds the value's length."""
    try:
        value = json.loads(raw)
    except ValueError:
        raise BlockFormatError("header holds a malformed string") from None
    if not isinstance(value, str) or len(value) > limit:
        raise BlockFormatError(f"a header string is longer than {limit} characters")
    return value
