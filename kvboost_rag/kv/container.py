"""The container of a block: the JSON header in front of its bytes, written in one canonical form and read with bounds.

Four versions are read, two are written (see ``docs/store-format.md``). They differ in what vouches for K and V: up to
version 2 one checksum over everything behind the header, so all of it must be there before any of it can be used;
since version 3 one per layer. Version 4 is version 3 with each layer in a frame of its own, squeezed without loss. The
checksum of the header itself covers the others.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import xxhash

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import FORMAT_VERSION, Block, BlockHeader
from kvboost_rag.kv.fields import FRAMED_VERSION, MAX_FIELDS_BYTES, VERSIONS, read_fields, write_fields
from kvboost_rag.kv.frames import MAX_EXPANSION
from kvboost_rag.kv.packing import layout_of

MAX_HEADER_BYTES = 16 << 20  # text included
MAX_TOKENS = 1 << 22
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 14
MAX_KV_BYTES = 8 << 30  # that come back: frames and 4 bits together can hold 32 times what was sent
ALIGNMENT = 64  # bytes; where K and V start, counted from the start of the block

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Shape = tuple[int, int, int, int, int]

# The checksum of the header stands at a fixed place in it, and counts as zeros while it is computed.
_MAGIC = b'{"__metadata__":{"format":"kvboost_rag/'
PREFIXES = {version: _MAGIC + b'%d","header_checksum":"' % version for version in VERSIONS}
PREFIX_BYTES = len(PREFIXES[FORMAT_VERSION])
_DIGITS = 32  # of one checksum
_COUNTED = ("layers", "heads", "tokens", "head_dim", "ids", "ids_end", "kv_start", "kv_end", "rows", "row_bytes",
            "framed_bytes")  # fmt: skip
_ZEROS = b"0" * _DIGITS

_NUMBER = rb"[1-9][0-9]{0,14}"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_HEX = rb"[0-9a-f]{32}"


def _group(name: str, pattern: bytes) -> bytes:
    return b"(?P<" + name.encode() + b">" + pattern + b")"


def _numbers(*names: str) -> bytes:
    return b",".join(_group(name, _NUMBER) for name in names)


def _patterns(sums: bytes) -> tuple[re.Pattern[bytes], ...]:
    """What stands behind the header's checksum: for K and V as they are, compressed (bytes of [layers, bytes per
    layer], with the dtype and shape that come back), and in frames (with what is in them and how long each is)."""
    dtype = _group("dtype", b"F32|F16|BF16")
    names = (
        sums + rb'","block":' + _group("block", _STRING) + rb',"text":' + _group("text", _STRING) + rb"\},"
        rb'"token_ids":\{"dtype":"I32","shape":\[' + _numbers("ids") + rb'\],"data_offsets":\[0,' + _numbers("ids_end")
        + rb"\]\}," + rb'"kv":\{"dtype":"'
    )  # fmt: skip
    offsets = rb'\],"data_offsets":\[' + _numbers("kv_start", "kv_end") + rb"\]\}\} {0,63}"
    plain = dtype + rb'","shape":\[' + _numbers("layers") + b",2," + _numbers("heads", "tokens", "head_dim")
    unpacked = rb'","unpacked":"' + dtype + b"," + _numbers("layers", "heads", "tokens", "head_dim")
    packed = rb'U8","shape":\[' + _numbers("rows", "row_bytes")
    frames = (
        rb'","zstd":"' + _group("held", b"U8|F32|F16|BF16") + rb",(?P<frames>" + _NUMBER + rb"(?:," + _NUMBER + rb")*+)"
    )
    framed = rb'U8","shape":\[' + _numbers("framed_bytes")
    wholes = names + plain, unpacked + names + packed, unpacked + frames + names + framed
    return tuple(re.compile(whole + offsets, re.DOTALL) for whole in wholes)


_WHOLE = rb'","payload_checksum":"' + _group("first", _HEX) + _group("sums", b"")  # up to version 2
_BY_LAYER = (
    rb'","ids_checksum":"' + _group("first", _HEX) + rb'","layer_checksums":"' + _group("sums", b"(?:" + _HEX + b")++")
)
_PATTERNS = {version: _patterns(_BY_LAYER if version >= FORMAT_VERSION else _WHOLE) for version in VERSIONS}
# Which of the patterns a version may have: exact, compressed, framed.
_KINDS = {version: (2,) if version == FRAMED_VERSION else (0, 1)[:version] for version in VERSIONS}


class ForeignBlockError(BlockFormatError):
    """Bytes that were never a block of ours, or are one of a format version that is not read here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a container header says, checked against the length of its buffer."""

    header: BlockHeader
    first_checksum: str  # of the token ids; up to version 2 of everything behind the header
    layer_checksums: tuple[str, ...]  # none up to version 2
    dtype: torch.dtype  # of the tensor that comes back
    shape: Shape  # likewise
    packed: bool
    data_start: int  # bytes; token ids
    kv_start: int  # bytes
    layer_bytes: int
    bounds: tuple[tuple[int, int], ...]  # where each layer, or its frame, lies: first byte, and the one behind it
    framed: bool

    @property
    def num_tokens(self) -> int:
        return self.shape[3]

    @property
    def item(self) -> int:
        """Bytes of an element of what is stored."""
        return 1 if self.packed else self.dtype.itemsize


def write_container(block: Block, ids: bytes, layers: Sequence[memoryview | bytes], *, framed: bool = False) -> bytes:
    """The bytes in front of ``ids`` and ``layers`` (what :mod:`~kvboost_rag.kv.codec` writes behind them), their length
    included. ``framed``: each of the layers is a frame.

    Raises:
        BlockFormatError: header values that cannot be written, or too many.
    """
    version = FRAMED_VERSION if framed else FORMAT_VERSION
    fields, text = json.dumps(write_fields(block.header, version)), json.dumps(block.header.text)
    total = sum(map(len, layers))
    unpacked_as, dtype, shape = _described(block, layers if framed else None)
    sums = "".join(map(xxhash.xxh3_128_hexdigest, layers))
    rest = (
        f'{unpacked_as}","ids_checksum":"{xxhash.xxh3_128_hexdigest(ids)}","layer_checksums":"{sums}"'
        f',"block":{fields},"text":{text}}},'
        f'"token_ids":{{"dtype":"I32","shape":[{len(block.token_ids)}],"data_offsets":[0,{len(ids)}]}},'
        f'"kv":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{len(ids)},{len(ids) + total}]}}}}'
    ).encode("ascii")
    prefix = PREFIXES[version]
    rest += b" " * (-(8 + len(prefix) + _DIGITS + len(rest) + len(ids)) % ALIGNMENT)  # so that K and V start aligned
    size = len(prefix) + _DIGITS + len(rest)
    if size > MAX_HEADER_BYTES:
        raise BlockFormatError(f"header larger than {MAX_HEADER_BYTES} bytes", hint="store without text")
    return struct.pack("<Q", size) + prefix + _header_checksum(prefix, rest) + rest


def _described(block: Block, frames: Sequence[memoryview | bytes] | None) -> tuple[str, str, str]:
    """(what comes back, dtype and shape of what is stored), as the header says it."""
    layers, _, heads, tokens, head_dim = block.kv.shape
    back, name = f"{layers},{heads},{tokens},{head_dim}", DTYPE_NAMES[block.kv.dtype]
    if frames is not None:
        held = name if block.packed is None else "U8"
        sizes = ",".join(str(len(frame)) for frame in frames)
        return f'","unpacked":"{name},{back}","zstd":"{held},{sizes}', "U8", str(sum(map(len, frames)))
    if block.packed is not None:
        return f'","unpacked":"{name},{back}', "U8", ",".join(map(str, block.packed.data.shape))
    return "", name, ",".join(map(str, block.kv.shape))


def read_container(view: memoryview) -> Layout:
    """What ``view``, which must be exactly a block, says of itself; the header's own checksum is verified, nothing
    behind it is touched.

    Raises:
        ForeignBlockError: not a block of ours, or of another format version.
        BlockFormatError: a damaged block.
    """
    version, size = _head(view)
    prefix = PREFIXES[version]
    fields = view[8 : 8 + size]
    stated = bytes(fields[len(prefix) : len(prefix) + _DIGITS])
    rest = bytes(fields[len(prefix) + _DIGITS :])
    if stated != _header_checksum(prefix, rest):
        raise BlockFormatError("header checksum does not match")
    matches = (_PATTERNS[version][kind].fullmatch(rest) for kind in _KINDS[version])
    match = next((match for match in matches if match is not None), None)
    if match is None:
        raise BlockFormatError("header is not in canonical form")
    return _layout(match, version, 8 + size, len(view))


def _layout(match: re.Match[bytes], version: int, start: int, length: int) -> Layout:
    """What a header in canonical form says, if that fits a buffer of ``length`` bytes, of which it takes ``start``."""
    number = {name: int(text) for name, text in match.groupdict().items() if name in _COUNTED}
    shape = (number["layers"], 2, number["heads"], number["tokens"], number["head_dim"])
    check_shape(shape)
    if (number["ids"], number["ids_end"], number["kv_start"]) != (shape[3], 4 * shape[3], 4 * shape[3]):
        raise BlockFormatError("token ids and K/V disagree about their size")
    fields = read_fields(_parse_string(match["block"], MAX_FIELDS_BYTES), version)
    header = BlockHeader(text=_parse_string(match["text"], MAX_HEADER_BYTES), **fields)
    dtype, groups = DTYPES[match["dtype"].decode()], match.groupdict()
    if math.prod(shape) * dtype.itemsize > MAX_KV_BYTES:
        raise BlockFormatError(f"K/V of {math.prod(shape) * dtype.itemsize} bytes; at most {MAX_KV_BYTES} are read")
    held = groups.get("held", b"U8" if "rows" in number else match["dtype"])
    packed = held == b"U8"
    if not packed and held != match["dtype"]:
        raise BlockFormatError("frames that hold another dtype than comes back")
    layer_bytes = _packed_bytes(header.compression, shape) if packed else math.prod(shape[1:]) * dtype.itemsize
    if "rows" in number and (number["rows"], number["row_bytes"]) != (shape[0], layer_bytes):
        raise BlockFormatError("a compressed block of another size than its shape calls for")
    sizes, framed = [layer_bytes] * shape[0], "framed_bytes" in number
    if framed:
        sizes = _frames(match["frames"], number["framed_bytes"], shape[0], shape[0] * layer_bytes)
    end = start + number["kv_end"]
    if number["kv_end"] - number["kv_start"] != sum(sizes) or end != length:
        raise BlockFormatError(f"a block of {end} bytes in {length}")
    if (start + number["kv_start"]) % ALIGNMENT:
        raise BlockFormatError("K/V are not aligned")
    sums = match["sums"].decode()
    if version >= FORMAT_VERSION and len(sums) != shape[0] * _DIGITS:
        raise BlockFormatError("not one checksum per layer")
    return Layout(
        header=header,
        first_checksum=match["first"].decode(),
        layer_checksums=tuple(sums[at : at + _DIGITS] for at in range(0, len(sums), _DIGITS)),
        dtype=dtype,
        shape=shape,
        packed=packed,
        data_start=start,
        kv_start=start + number["kv_start"],
        layer_bytes=layer_bytes,
        bounds=tuple(pairwise(accumulate(sizes, initial=start + number["kv_start"]))),
        framed=framed,
    )


def _frames(text: bytes, total: int, layers: int, expanded: int) -> list[int]:
    """Bytes of each frame; ``total`` is what they must add up to, ``expanded`` what comes out of them."""
    frames = [int(size) for size in text.split(b",")]
    if len(frames) != layers or sum(frames) != total:
        raise BlockFormatError("frames that do not fit the layers")
    if expanded > MAX_EXPANSION * total:
        raise BlockFormatError(f"{expanded} bytes in frames of {total}: more than {MAX_EXPANSION} times as many")
    return frames


def check_shape(shape: tuple[int, ...]) -> None:
    """Raises BlockFormatError for a shape of K and V that is beyond the limits."""
    limits = (MAX_LAYERS, 2, MAX_HEADS, MAX_TOKENS, MAX_HEAD_DIM)
    if not all(1 <= n <= limit for n, limit in zip(shape, limits, strict=True)):
        raise BlockFormatError(f"K/V of shape {shape} are outside of 1 to {limits}")


def _packed_bytes(compression: str, shape: Shape) -> int:
    if compression == "none":
        raise BlockFormatError("compressed bytes in a block that says it is exact")
    return layout_of(compression, *shape[2:]).layer_bytes


def _header_checksum(prefix: bytes, rest: bytes) -> bytes:
    digest = xxhash.xxh3_128(prefix + _ZEROS)
    digest.update(rest)
    return digest.hexdigest().encode("ascii")


def _head(view: memoryview) -> tuple[int, int]:
    """(format version, bytes of the container header), after what can be told without reading it whole."""
    magic = bytes(view[8 : 8 + PREFIX_BYTES])
    version = next((number for number, prefix in PREFIXES.items() if magic == prefix), None)
    if version is None:
        if len(view) < 8 + PREFIX_BYTES and any(prefix.startswith(magic) for prefix in PREFIXES.values()):
            raise BlockFormatError(f"truncated to {len(view)} bytes")
        if magic.startswith(_MAGIC):
            stated = magic[len(_MAGIC) :].split(b'"')[0].decode("ascii", "replace")
            raise ForeignBlockError(f"format version {stated!r} is not read here", hint=f"known: {VERSIONS}")
        raise ForeignBlockError("not a block of kvboost_rag")
    (size,) = struct.unpack_from("<Q", view)
    if not PREFIX_BYTES + _DIGITS <= size <= MAX_HEADER_BYTES:
        raise BlockFormatError(f"header of {size} bytes, at most {MAX_HEADER_BYTES}")
    if 8 + size > len(view):
        raise BlockFormatError(f"truncated to {len(view)} bytes")
    return version, int(size)


def _parse_string(raw: bytes, limit: int) -> str:
    """The value of a JSON string literal. ``limit`` bounds the value's length."""
    try:
        value = json.loads(raw)
    except ValueError:
        raise BlockFormatError("header holds a malformed string") from None
    if not isinstance(value, str) or len(value) > limit:
        raise BlockFormatError(f"a header string is longer than {limit} characters")
    return value
