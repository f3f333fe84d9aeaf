"""Blocks to bytes and back: safetensors bytes with a fixed, bounded header. ``docs/store-format.md`` has the layout.

The container is plain safetensors, so any tool can look inside, but it is written in one canonical form and read by the
small reader of :mod:`~kvboost_rag.kv.container` instead of by a general JSON parser. Bytes come from disks and networks
and count as hostile: every length is checked against the buffer before anything is allocated, checksums cover every
byte, and all that is not exactly a block is a :class:`~kvboost_rag.errors.BlockFormatError`.
"""

from __future__ import annotations

import struct
import threading
from mmap import mmap

import torch
import xxhash

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv import container
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.compress import unpacked
from kvboost_rag.kv.container import (
    ALIGNMENT,
    DTYPE_NAMES,
    DTYPES,
    ForeignBlockError,
    Layout,
    check_shape,
    read_container,
    write_container,
)
from kvboost_rag.kv.frames import expand, require_zstd, squeeze
from kvboost_rag.kv.memory import within_memory
from kvboost_rag.kv.quantize import Packed

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "ForeignBlockError",
    "LayerReader",
    "bytes_before_layers",
    "decode_block",
    "encode_block",
    "encode_parts",
    "read_header",
]

Buffer = bytes | bytearray | memoryview | mmap


@within_memory()
def encode_parts(block: Block, *, framed: bool = False) -> list[memoryview | bytes]:
    """The bytes of ``block`` as pieces to write one after the other; the tensor's own memory is not copied. A block
    with a compressed form (``block.packed``) is written in that form.

    Args:
        framed: squeeze each layer without loss, where that makes the block smaller.

    Raises:
        BlockFormatError: the block cannot be written in this format (dtype, size, header values).
        MemoryError: there is not enough.
        MissingExtraError: ``framed``, and the library for it is not installed.
    """
    if DTYPE_NAMES.get(block.kv.dtype) is None:
        raise BlockFormatError(f"blocks of {block.kv.dtype} cannot be stored", hint=f"store one of {[*DTYPES]}")
    check_shape(tuple(block.kv.shape))
    if block.kv.nbytes > container.MAX_KV_BYTES:
        raise BlockFormatError(f"K/V of {block.kv.nbytes} bytes cannot be stored", hint="split the chunk")
    kv = _raw(block.kv if block.packed is None else block.packed.data)
    ids, size = _pack_ids(block.token_ids), len(kv) // block.kv.shape[0]
    layers = [kv[at : at + size] for at in range(0, len(kv), size)]
    frames = squeeze(layers, block.kv.itemsize if block.packed is None else 1) if framed else None
    if frames is not None:
        return [write_container(block, ids, frames, framed=True) + ids, *frames]
    return [write_container(block, ids, layers) + ids, kv]


def encode_block(block: Block, *, framed: bool = False) -> bytes:
    """The bytes of ``block``. Raises like :func:`encode_parts`."""
    return b"".join(encode_parts(block, framed=framed))


@within_memory()
def decode_block(buffer: Buffer, *, verify: bool = True) -> Block:
    """The block in ``buffer``, which must hold nothing else.

    A writable buffer (such as a private mapping of a file) is not copied: the tensor is a view of it and keeps it
    alive. A read-only one is copied, since a tensor over it could be written to behind its owner's back. K and V of a
    compressed block, or in frames, are unpacked into memory of their own, in the dtype that they had.

    Args:
        buffer: the whole block.
        verify: also check token ids, K and V (about 0.1 ms per MB). The header is always checked.

    Raises:
        ForeignBlockError: not a block of ours, or of another format version.
        BlockFormatError: a damaged block.
        MissingExtraError: a sound block (as far as it was verified) in frames, and their library is not installed.
        MemoryError: there is not enough for what it unpacks to.
    """
    view = _as_bytes(buffer)
    layout = read_container(view)
    if verify:
        _verify_first(view, layout)
        for layer in range(len(layout.layer_checksums)):
            _verify_layer(view, layout, layer)
    token_ids = _unpack_ids(view, layout)
    source = _bytes_of(view, layout, 0, layout.shape[0])
    if layout.packed:
        return unpacked(_packed(source, layout), token_ids, layout.header)
    return Block(kv=source.view(layout.dtype).view(layout.shape), token_ids=token_ids, header=layout.header)


def read_header(buffer: Buffer) -> tuple[BlockHeader, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(header, token ids, shape of K and V, dtype) of the block in ``buffer``, without touching K and V.

    The header's checksum is verified, those of token ids, K and V are not. Raises like :func:`decode_block`.
    """
    view = _as_bytes(buffer)
    layout = read_container(view)
    return layout.header, _unpack_ids(view, layout), layout.shape, layout.dtype


class LayerReader:
    """K and V of the block in ``buffer``, one layer at a time: a layer can be used when its own bytes are there and
    have passed their checksum, whatever is true of those behind it. Different layers may be read at once, from several
    threads. Blocks of format versions 1 and 2 have one checksum over all (:attr:`by_layer` is False): their first layer
    costs as much as the whole, and one thread reads them.

    Args:
        buffer: as long as the whole block.
        ahead: all bytes are at hand, so that small compressed layers may be brought back several at a time.

    Raises:
        ForeignBlockError, BlockFormatError: the header or the token ids are not sound. Layers are not looked at yet.
        MissingExtraError: layers lie in frames, and their library is not installed.
        MemoryError: there is not enough.
    """

    @within_memory()
    def __init__(self, buffer: Buffer, *, ahead: bool = False) -> None:
        self._view = _as_bytes(buffer)
        self._layout = layout = read_container(self._view)
        if layout.framed:
            require_zstd()
        self.by_layer = bool(layout.layer_checksums)
        self._checked = self.by_layer  # up to version 2: with the first layer
        if self.by_layer:
            _verify_first(self._view, layout)
        self.header, self.shape, self.dtype = layout.header, layout.shape, layout.dtype
        self.token_ids = _unpack_ids(self._view, layout)
        behind = self._view[layout.kv_start :]
        self._in_place = not (layout.packed or layout.framed or behind.readonly)
        #: ``[num_layers, 2, num_kv_heads, num_tokens, head_dim]``; a layer holds anything before it was read.
        self.kv = (
            torch.frombuffer(behind, dtype=layout.dtype).view(layout.shape)
            if self._in_place
            else torch.empty(layout.shape, dtype=layout.dtype)
        )
        self._packed = _packed(self._codes(behind), layout) if layout.packed else None
        self._at_once = self._packed.layers_at_once if ahead and self._packed is not None else 1
        self._locks = [threading.Lock() for _ in range(layout.shape[0] if self._at_once == 1 else 1)]
        self._done: set[int] = set()  # layers that were brought back, perhaps before they were asked for

    def _codes(self, behind: memoryview) -> torch.Tensor:
        """Where a compressed block's bytes lie, or come to lie when its frames are opened."""
        if self._layout.framed:
            return torch.empty(self.shape[0] * self._layout.layer_bytes, dtype=torch.uint8)
        return torch.frombuffer(bytearray(behind) if behind.readonly else behind, dtype=torch.uint8)

    def end_of(self, index: int) -> int:
        """How many bytes of the buffer must be there for layer ``index`` to be read."""
        layout = self._layout
        return layout.bounds[index][1] if self.by_layer else len(self._view)

    @within_memory()
    def read(self, index: int) -> None:
        """Verify layer ``index``; ``kv[index]`` can be used then.

        Raises:
            BlockFormatError: its bytes are damaged.
        """
        layout = self._layout
        if not 0 <= index < layout.shape[0]:
            raise IndexError(index)
        if not self._checked:
            _verify_first(self._view, layout)
            self._checked = True
        with self._locks[index % len(self._locks)]:
            if index in self._done:  # never again: somebody may be using it, and what is unpacked is not right at once
                return
            ahead = range(index + 1, min(index + self._at_once, layout.shape[0]))
            stop = next((layer for layer in ahead if layer in self._done), ahead.stop)
            self._read(index, stop)
            self._done.update(range(index, stop))

    def _read(self, first: int, stop: int) -> None:
        layout = self._layout
        for index in range(first, stop) if self.by_layer else ():
            _verify_layer(self._view, layout, index)
        stored = self.kv.view(layout.shape[0], -1).view(torch.uint8) if self._packed is None else self._packed.data
        if layout.framed:
            frames = [_stored(self._view, layout, index) for index in range(first, stop)]
            expand(frames, layout.item, stored[first:stop].numpy())
        elif self._packed is None and not self._in_place:
            stored[first] = torch.frombuffer(bytearray(_stored(self._view, layout, first)), dtype=torch.uint8)
        if self._packed is not None:
            self._packed.unpack_layers(first, stop, self.kv)

    def layer(self, index: int) -> torch.Tensor:
        """K (without rotation) and V of layer ``index``, verified: ``[2, num_kv_heads, num_tokens, head_dim]``. A view
        where :func:`decode_block` would give one; never write into it. Raises like :meth:`read`."""
        self.read(index)
        return self.kv[index]

    def block(self) -> Block:
        """The whole block, without looking at it again: every layer must have been read."""
        return Block(self.kv, self.token_ids, self.header, packed=self._packed)


def bytes_before_layers(buffer: Buffer, have: int) -> int:
    """How many bytes of a block must be there before a :class:`LayerReader` can be made, as far as its first ``have``
    bytes tell: ask again when those are there. ``buffer`` is as long as the whole block.

    Raises:
        ForeignBlockError, BlockFormatError: not a block, a damaged header.
    """
    view = _as_bytes(buffer)
    if have < 8:
        return min(8, len(view))
    (size,) = struct.unpack_from("<Q", view)
    if have < 8 + size <= len(view):
        return 8 + int(size)
    return read_container(view).kv_start


def _stored(view: memoryview, layout: Layout, index: int) -> memoryview:
    """A layer's bytes as they are stored."""
    start, stop = layout.bounds[index]
    return view[start:stop]


def _bytes_of(view: memoryview, layout: Layout, first: int, stop: int) -> torch.Tensor:
    """The bytes of layers ``[first, stop)``, out of their frames: uint8, one run. A view of a writable buffer where
    there are no frames."""
    if layout.framed:
        out = torch.empty(stop - first, layout.layer_bytes, dtype=torch.uint8)
        expand([_stored(view, layout, index) for index in range(first, stop)], layout.item, out.numpy())
        return out.view(-1)
    raw = view[layout.kv_start + first * layout.layer_bytes : layout.kv_start + stop * layout.layer_bytes]
    return torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8)


def _verify_first(view: memoryview, layout: Layout) -> None:
    """Check what the first checksum covers: the token ids; up to version 2 everything behind the header."""
    covered = view[layout.data_start : layout.kv_start if layout.layer_checksums else len(view)]
    if xxhash.xxh3_128_hexdigest(covered) != layout.first_checksum:
        raise BlockFormatError("payload checksum does not match")


def _verify_layer(view: memoryview, layout: Layout, index: int) -> None:
    if xxhash.xxh3_128_hexdigest(_stored(view, layout, index)) != layout.layer_checksums[index]:
        raise BlockFormatError(f"checksum of layer {index} does not match")


def _packed(source: torch.Tensor, layout: Layout) -> Packed:
    """The compressed form in ``source``, which holds whole layers."""
    _, _, heads, tokens, head_dim = layout.shape
    return Packed(layout.header.compression, source.view(-1, layout.layer_bytes), layout.dtype, heads, tokens, head_dim)


def _raw(kv: torch.Tensor) -> memoryview:
    flat = kv.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _pack_ids(token_ids: tuple[int, ...]) -> bytes:
    if min(token_ids) < 0 or max(token_ids) >= 1 << 31:
        raise BlockFormatError("token ids do not fit int32")
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _unpack_ids(view: memoryview, layout: Layout) -> tuple[int, ...]:
    token_ids = struct.unpack_from(f"<{layout.num_tokens}i", view, layout.data_start)
    if min(token_ids) < 0:
        raise BlockFormatError("negative token ids")
    return token_ids
