"""Prefixes that are still held: earlier requests' KV, reused without repair.

An entry is what a request left behind: its text, its segments, its tokens, its KV, and how far that KV is *exact*
(equal to a full prefill). Exact parts serve any request that starts with the same tokens. Approximate parts serve only
a true continuation of the same conversation (the new prompt starts with the entry's whole text) under the same repair
policy, and the report says so; they are never handed out as exact.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

import torch

from kvboost_rag.chunk import Segment
from kvboost_rag.model.cache import KVCache

MAX_ENTRIES = 256


@dataclass(slots=True)
class Held:
    """KV of ``len(token_ids)`` positions, rotated: ``kv [num_layers, 2, num_kv_heads, >= num_tokens, head_dim]``, or
    pages, which move to host memory when the device needs theirs."""

    fingerprint: str
    salt: str
    policy: str  # repair recipe that made the approximate part
    text: str
    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    exact_tokens: int
    kv: torch.Tensor | KVCache
    prompt_chars: int = 0  # of the text: the prompt, without the answer
    contents: tuple[tuple[int, int], ...] = ()  # characters of the prompt that came from messages
    id: int = field(default_factory=count().__next__)

    @property
    def nbytes(self) -> int:
        return int(self.kv.nbytes)

    def begins(self, text: str, contents: tuple[tuple[int, int], ...]) -> bool:
        """Whether a prompt starts with all of this, read in the same way: the same words may be the template's in one
        prompt, with their control tokens, and a message's content in another, without."""
        read_alike = tuple(c for c in contents if c[0] < self.prompt_chars) == self.contents
        return 0 < len(self.text) < len(text) and text.startswith(self.text) and read_alike


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``num_tokens`` positions of ``held`` may be reused; ``exact`` if they equal a full prefill."""

    held: Held
    num_tokens: int
    exact: bool


class PrefixCache:
    """Held prefixes inside a byte budget, least recently used goes first. Thread-safe. Never writes into held KV."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[int, Held] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of KV held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def add(self, entry: Held) -> bool:
        """Hold ``entry`` (takes over its tensor). Entries that it extends are dropped. False if it does not fit."""
        if entry.nbytes > self.limit_bytes or not entry.token_ids:
            return False
        with self._lock:
            for old in list(self._entries.values()):
                if _extends(entry, old):
                    self._drop(old)
            self._entries[entry.id] = entry
            self._bytes += entry.nbytes
            while self._bytes > self.limit_bytes or len(self._entries) > MAX_ENTRIES:
                self._drop(next(iter(self._entries.values())))
        return True

    def _drop(self, entry: Held) -> None:
        del self._entries[entry.id]
        self._bytes -= entry.nbytes

    def longest(self, token_ids: tuple[int, ...], *, fingerprint: str, salt: str, limit: int) -> PrefixHit | None:
        """The longest exact token prefix, at most ``limit`` tokens."""
        best: PrefixHit | None = None
        with self._lock:
            for held in self._entries.values():
                if held.fingerprint != fingerprint or held.salt != salt:
                    continue
                n = min(common_prefix(token_ids, held.token_ids), held.exact_tokens, limit)
                if n and (best is None or n > best.num_tokens):
                    best = PrefixHit(held, n, exact=True)
            if best is not None:
                self._entries.move_to_end(best.held.id)
        return best

    def continuation(
        self, text: str, contents: tuple[tuple[int, int], ...], *, fingerprint: str, salt: str, policy: str
    ) -> Held | None:
        """The longest entry with chunks whose whole text starts ``text``: its segmentation is kept by later turns.
        ``contents`` are the places of message contents in it.
        (Without chunks there is none to keep: an exact token prefix serves, and the answer's ids are those that
        tokenising its text gives.)"""
        best: Held | None = None
        with self._lock:
            for held in self._entries.values():
                if held.fingerprint != fingerprint or held.salt != salt or held.policy != policy:
                    continue
                if all(s.kind == "glue" for s in held.segments):
                    continue
                longer = best is None or len(held.text) > len(best.text)
                if longer and held.begins(text, contents):
                    best = held
            if best is not None:
                self._entries.move_to_end(best.id)
        return best


def _extends(new: Held, old: Held) -> bool:
    """Whether ``old`` has nothing that ``new`` does not have at least as well."""
    return (
        new.fingerprint == old.fingerprint
        and new.salt == old.salt
        and len(new.token_ids) >= len(old.token_ids)
        and new.token_ids[: len(old.token_ids)] == old.token_ids
        and new.exact_tokens >= old.exact_tokens
        and new.policy == old.policy
    )


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix of two token tuples (binary search over slice equality)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
