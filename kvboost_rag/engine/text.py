"""Token ids to text as they come: whole characters only, stop strings that span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # ids of left context that decoding may depend on (word-start marks, byte pieces)


class Detokenizer:
    """Feed ids, get the text that is certain: never half a character, never the start of a stop string.

    Special tokens are not part of the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._read = 0  # ids already turned into text
        self._begin = 0  # decoding starts here: at a character's edge (half a run of byte pieces decodes to nothing)
        self._edges = [0]  # where whole characters ended, from _begin on
        self._held = ""  # certain characters that may begin a stop string
        self.stopped = False

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, token_id: int) -> str:
        """Add one id; the new certain text (may be empty). After a stop string: text up to it, then nothing."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if after.endswith("\ufffd"):  # a character is not complete yet
            return ""
        self._advance()
        return self._release(after[len(before) :], final=False)

    def _advance(self) -> None:
        self._read = len(self._ids)
        self._edges.append(self._read)
        while len(self._edges) > 1 and self._edges[1] <= self._read - CONTEXT:
            self._edges.pop(0)
        self._begin = self._edges[0]

    def finish(self) -> str:
        """No more ids: whatever is left, incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._begin : self._read])
        rest = self._decode(self._ids[self._begin :])[len(before) :]
        self._read = len(self._ids)
        return self._release(rest, final=True)

    def _release(self, new: str, *, final: bool) -> str:
        text = self._held + new
        hits = [i for i in (text.find(s) for s in self._stop) if i >= 0]
        if hits:
            self.stopped, self._held = True, ""
            return text[: min(hits)]
        keep = 0 if final else self._suspect(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _suspect(self, text: str) -> int:
        """Length of the longest end of ``text`` that could begin a stop string."""
        longest = 0
        for s in self._stop:
            for n in range(min(len(s) - 1, len(text)), longest, -1):
                if text.endswith(s[:n]):
                    longest = n
                    break
        return longest
