"""The JSON of a block's header fields, written and read with bounds. Part of the codec."""

from __future__ import annotations

import json
import math
from typing import Any

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import FORMAT_VERSION, BlockHeader
from kvboost_rag.kv.packing import COMPRESSIONS

MAX_FIELDS_BYTES = 64 << 10  # the JSON of all header fields but the text
EXACT_VERSION = 1  # knew no compression
COMPRESSED_VERSION = 2  # of blocks that were compressed, beside version 1
FRAMED_VERSION = 4  # FORMAT_VERSION with every layer in a frame of its own
VERSIONS = (
    EXACT_VERSION,
    COMPRESSED_VERSION,
    FORMAT_VERSION,
    FRAMED_VERSION,
)  # that are read; the last two are written

_STR_FIELDS = ("fingerprint", "context", "context_kind", "salt", "attention")
_FLOAT_FIELDS = ("created_s", "cost_s")
_FIELDS = {*_STR_FIELDS, *_FLOAT_FIELDS, "tags", "format_version"}


def write_fields(header: BlockHeader, version: int = FORMAT_VERSION) -> str:
    """The fields of ``header`` as JSON of format ``version``, without its text.

    Raises:
        BlockFormatError: they cannot be written.
    """
    if header.format_version not in VERSIONS or header.compression not in COMPRESSIONS:
        raise BlockFormatError(f"cannot write format version {header.format_version!r}, {header.compression!r}")
    fields = {name: value for name, value in header.as_dict().items() if name != "text"}
    fields["format_version"] = version  # whatever it was read from
    try:
        fields |= {name: float(getattr(header, name)) for name in _FLOAT_FIELDS}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BlockFormatError(f"header is not plain JSON: {error}") from None
    if len(text) > MAX_FIELDS_BYTES:
        raise BlockFormatError(f"header fields take {len(text)} bytes, at most {MAX_FIELDS_BYTES}", hint="fewer tags")
    return text


def read_fields(text: str, version: int) -> dict[str, Any]:
    """Arguments of :class:`BlockHeader`, checked, from JSON of format ``version``.

    Raises:
        BlockFormatError: they are not exactly the known ones.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise BlockFormatError("header fields are not JSON") from None
    known = _FIELDS if version == EXACT_VERSION else _FIELDS | {"compression"}
    if not isinstance(fields, dict) or set(fields) != known:
        raise BlockFormatError("header fields are not the known ones")
    _check_types(fields, version)
    return fields | {"tags": tuple(fields["tags"])}


def _check_types(fields: dict[str, Any], version: int) -> None:
    strings = all(type(fields[name]) is str for name in _STR_FIELDS)
    floats = all(type(fields[name]) is float and math.isfinite(fields[name]) for name in _FLOAT_FIELDS)
    tags = type(fields["tags"]) is list and all(type(tag) is str for tag in fields["tags"])
    compressions = COMPRESSIONS[1:] if version == COMPRESSED_VERSION else COMPRESSIONS
    compressed = fields.get("compression", "none") in compressions
    if not (strings and floats and tags and compressed and fields["format_version"] == version):
        raise BlockFormatError("header fields have the wrong types")
    try:
        "".join(fields[name] for name in _STR_FIELDS).encode()
    except UnicodeEncodeError:  # lone surrogates: no key can be derived from them
        raise BlockFormatError("header fields are not valid text") from None
