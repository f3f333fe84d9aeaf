"""The manifest of a remote store: small named values, the first writer wins on every machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvboost_rag.store.manifest import MAX_VALUE_BYTES, entry_name, pack_entry, unpack_entry
from kvboost_rag.store.remote_link import Link, Medium, TooLarge, Unavailable


class RemoteManifest:
    """Named values behind ``medium``. While it does not answer, values hold in this process.

    Args:
        warn: told when the medium does not answer.
    """

    def __init__(self, medium: Medium, link: Link, warn: Callable[[Exception], None]) -> None:
        self._medium, self._link, self._warn = medium, link, warn
        self._held: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """The value of ``name``, or None. A damaged one is removed and counts as unset."""
        path = f"meta/{entry_name(name)}"
        try:
            value = self._link.call(lambda: self._medium.read([path], MAX_VALUE_BYTES + 65536)[0])
        except Unavailable as error:
            self._warn(error)
            return self._held.get(name)
        if value is None:
            return self._held.get(name)
        with suppress(ValueError):
            if not isinstance(value, TooLarge):
                return unpack_entry(bytes(value), name)
        with suppress(Unavailable):
            self._link.call(lambda: self._medium.delete([path]))
        return self._held.get(name)

    def put(self, name: str, value: bytes) -> bytes:
        """Set ``name`` unless it is set; the value that holds now."""
        path, entry = f"meta/{entry_name(name)}", pack_entry(name, value)
        for _ in range(3):
            present = self.get(name)
            if present is not None:
                return present
            try:
                if self._link.call(lambda: self._medium.create(path, entry)):
                    return bytes(value)
            except Unavailable as error:
                self._warn(error)
                break
        return self._held.setdefault(name, bytes(value))

    def set(self, name: str, value: bytes) -> bool:
        """Set ``name``, whoever set it before; False if the medium does not take it (it holds in this process)."""
        path, entry = f"meta/{entry_name(name)}", pack_entry(name, value)
        try:
            self._link.call(lambda: self._medium.write(path, entry))
        except Unavailable as error:
            self._warn(error)
            self._held[name] = bytes(value)
            return False
        self._held.pop(name, None)
        return True

    def forget(self) -> None:
        """Drop what holds in this process alone."""
        self._held.clear()
