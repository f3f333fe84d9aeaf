"""Reading blocks of a store on disk: from the key to the file to a verified block, or to a reason why not."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvboost_rag.errors import BlockFormatError, MissingExtraError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import LayerReader, decode_block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.base import Miss
from kvboost_rag.store.disk_files import BlockFiles, Identity, reason_of
from kvboost_rag.store.policy import is_expired

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)  # says nothing about the file itself
T = TypeVar("T", bound=Block | LayeredBlock)


class BlockReader:
    """Reads the blocks of ``files``. Asks no index and takes no lock.

    Args:
        files: the store's files.
        ttl_s: blocks older than this are misses; None for no limit.
        forget: told the keys of files that were set aside.
        delete: told the keys of blocks that have expired.
    """

    def __init__(
        self,
        files: BlockFiles,
        ttl_s: float | None,
        forget: Callable[[str], object],
        delete: Callable[[str], object],
    ) -> None:
        self._files, self._ttl_s, self._forget, self._delete = files, ttl_s, forget, delete

    def block(self, key: str) -> Block | Miss:
        """The whole block under ``key``, verified."""
        return self._read(key, lambda buffer, path, seen: decode_block(buffer))

    def layers(self, key: str) -> LayeredBlock | Miss:
        """The block under ``key`` with its layers unread. One that turns out damaged is set aside like any other."""
        return self._read(key, lambda buffer, path, seen: self._layered(LayerReader(buffer), path, seen))

    def opened(self, key: str) -> Block | LayeredBlock | Miss:
        """:meth:`layers`, or the whole block where its format has no checksum per layer."""

        def decode(buffer: memoryview, path: Path, seen: Identity) -> Block | LayeredBlock:
            reader = LayerReader(buffer, ahead=True)
            return self._layered(reader, path, seen) if reader.by_layer else decode_block(buffer)

        return self._read(key, decode)

    def _layered(self, reader: LayerReader, path: Path, seen: Identity) -> LayeredBlock:
        def read(index: int) -> None:
            try:
                reader.read(index)
            except BlockFormatError:
                if self._files.set_aside(path, seen, "damaged"):
                    self._forget(layered.key)
                raise

        layered = LayeredBlock(reader.header, reader.token_ids, reader.kv, read, reader.block)
        return layered

    def _read(self, key: str, decode: Callable[[memoryview, Path, Identity], T], *, again: bool = True) -> T | Miss:
        path = self._files.path(key)
        if path is None:
            return Miss("absent", "not a key")
        seen = None
        try:
            buffer, seen = self._files.read(path)
            found = decode(buffer, path, seen)
        except FileNotFoundError:
            return Miss("absent")
        except BlockFormatError as error:
            reason, detail = reason_of(error), str(error)
        except OSError as error:
            if error.errno in _PASSING:
                return Miss("unavailable", str(error))
            reason, detail = "damaged", str(error)
        except MemoryError:
            return Miss("unavailable", "out of memory")
        except MissingExtraError as error:  # sound: others can read it
            return Miss("unavailable", str(error))
        else:
            if found.key != key:
                reason, detail = "mismatch", f"holds {found.key}"
            elif is_expired(found.header, self._ttl_s, time.time(), seen[2] / 1e9):
                self._delete(key)
                return Miss("expired", f"older than {self._ttl_s:g} s")
            else:
                return found
        moved = self._files.set_aside(path, seen, reason)
        if not moved and again:  # another process replaced or moved it meanwhile
            return self._read(key, decode, again=False)
        self._forget(key)
        return Miss(reason, detail)
