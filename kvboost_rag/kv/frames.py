"""The lossless form of a block's bytes: each layer shuffled and squeezed on its own (``zstandard``, extra ``[zstd]``).

Shuffled means that the first bytes of all elements come first, then the second ones: signs and exponents of neighbours
are alike, mantissas are noise, and apart from each other the former can be squeezed. Frames are hostile input: what a
frame says of its size must be what the block's header says, before anything is allocated for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_rag.errors import BlockFormatError, MissingExtraError
from kvboost_rag.kv.workers import pool, workers_for

MAX_EXPANSION = 4  # times the bytes of the frames: what nature never reaches, a bomb must not
_LEVEL = 1  # higher ones take 3 to 10 times as long and save nothing: what is left is noise
_MAX_WINDOW = 1 << 27  # bytes that a decoder may be made to keep

Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=1)
def _zstandard() -> Any:
    return importlib.import_module("zstandard")


def require_zstd() -> Any:
    """The library.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return _zstandard()
    except ImportError as error:
        hint = "pip install 'kvboost-rag[zstd]'"
        raise MissingExtraError(f"blocks in zstd frames need zstandard: {error}", hint=hint) from None


def squeeze(layers: Sequence[memoryview], item: int) -> list[bytes] | None:
    """One frame per layer, whose elements have ``item`` bytes; None where that would not make the block smaller, or so
    much smaller that a reader would refuse it.

    Raises:
        MissingExtraError: the library is not installed.
    """
    zstd = require_zstd()
    total = sum(map(len, layers))
    frames: list[bytes] = [b""] * len(layers)

    def work(first: int, stop: int) -> None:
        compressor = zstd.ZstdCompressor(level=_LEVEL, write_content_size=True)
        for index in range(first, stop):
            frames[index] = compressor.compress(_shuffled(layers[index], item))

    _share(len(layers), total, work)
    return frames if total / MAX_EXPANSION <= sum(map(len, frames)) < total else None


def expand(frames: Sequence[memoryview], item: int, out: Bytes) -> None:
    """The layers in ``frames`` into ``out``, uint8 ``[num_layers, layer_bytes]``.

    Raises:
        BlockFormatError: a frame is damaged, or holds anything but exactly one layer.
        MissingExtraError: the library is not installed.
    """
    zstd = require_zstd()

    def work(first: int, stop: int) -> None:
        decoder = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        for index in range(first, stop):
            _unshuffle(_bytes_of(zstd, decoder, frames[index], out.shape[1]), item, out[index])

    _share(len(frames), out.size, work)


def _bytes_of(zstd: Any, decoder: Any, frame: memoryview, size: int) -> bytes:
    try:
        stated = zstd.get_frame_parameters(frame)
        if stated.content_size != size or stated.window_size > _MAX_WINDOW or stated.dict_id:
            raise BlockFormatError(f"a frame of {stated.content_size} bytes in place of a layer of {size}")
        data: bytes = decoder.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstd.ZstdError as error:
        raise BlockFormatError(f"a damaged frame: {error}") from None
    if len(data) != size:
        raise BlockFormatError(f"a frame of {len(data)} bytes in place of a layer of {size}")
    return data


def _shuffled(layer: memoryview, item: int) -> Bytes | memoryview:
    if item == 1:
        return layer
    elements = np.frombuffer(layer, np.uint8).reshape(-1, item)
    planes = np.empty((item, elements.shape[0]), np.uint8)
    for at in range(item):
        planes[at] = elements[:, at]
    return planes.reshape(-1)


def _unshuffle(data: bytes, item: int, out: Bytes) -> None:
    planes, elements = np.frombuffer(data, np.uint8).reshape(item, -1), out.reshape(-1, item)
    for at in range(item):
        elements[:, at] = planes[at]


def _share(layers: int, size: int, work: Any) -> None:
    """``work(first, stop)`` for all layers, by as many threads as torch uses."""
    workers = workers_for(layers, size)
    if workers < 2:
        work(0, layers)
        return
    cuts = [layers * i // workers for i in range(workers + 1)]
    for job in [pool().submit(work, a, b) for a, b in pairwise(cuts)]:
        job.result()
