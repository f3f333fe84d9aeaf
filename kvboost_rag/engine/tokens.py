"""Tokenise span by span, safely.

Two ways to encode a stretch of text: *literal* (the template's own words: special tokens are parsed) and *plain*
(content of messages and chunks: no added token is parsed, so ``<|im_end|>`` in a document is eleven harmless
characters). SentencePiece-style tokenizers put a word-start mark before every text they are given; a guard in front
takes it, and its tokens are cut off again. A span counts as encoded only if decoding gives its text back.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from kvboost_rag.errors import TokenizerError, UsageError

GUARDS = ("\n", ":", "a")
MEMO = 4096  # chunk texts whose ids are remembered


class SpanTokenizer:
    """Encodes glue and chunks of a prompt, and decodes ids to exact text.

    Raises:
        TokenizerError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{type(tokenizer).__name__} has no fast backend", hint="load it with use_fast=True (AutoTokenizer)"
            )
        self.tokenizer = tokenizer
        self._literal = Tokenizer.from_str(backend.to_str())
        self._literal.no_padding()
        self._literal.no_truncation()
        self._plain = _without_added_tokens(self._literal)
        self.added: tuple[str, ...] = tuple(sorted(tokenizer.get_added_vocab(), key=len, reverse=True))
        marked = {i for i, token in self._literal.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(tokenizer.all_special_ids) | marked  # transformers lists named roles only
        self._prefix_ids = self._leading_special()
        self._guard = self._find_guard()
        self._memo = lru_cache(MEMO)(self._chunk)  # thread-safe, unlike a dict kept in order by hand

    def _leading_special(self) -> tuple[int, ...]:
        """What the tokenizer itself puts in front of a text (BOS for Llama-style models)."""
        with_special = self._literal.encode("a", add_special_tokens=True).ids
        without = self._literal.encode("a", add_special_tokens=False).ids
        extra = len(with_special) - len(without)
        return tuple(with_special[:extra]) if extra > 0 and with_special[extra:] == without else ()

    def _find_guard(self) -> str:
        """ "" when spans encode cleanly on their own, else a text whose tokens shield a span from its left edge."""
        probe = "word two"
        alone = self._plain.encode(probe, add_special_tokens=False).ids
        if self.decode(alone) == probe and not str(self._plain.id_to_token(alone[0])).startswith("▁"):
            return ""
        for guard in GUARDS:
            ids = self._plain.encode(guard + probe, add_special_tokens=False).ids
            lead = self._plain.encode(guard, add_special_tokens=False).ids
            if ids[: len(lead)] == lead and self.decode(ids) != self.decode(lead):
                return guard
        return GUARDS[0]

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Ids to text, special tokens included, nothing cleaned up."""
        return self._literal.decode(list(token_ids), skip_special_tokens=False)

    def leading(self, text: str) -> tuple[int, ...]:
        """Special ids that belong in front of a whole prompt (BOS), unless the text already starts with them."""
        if not self._prefix_ids or text.startswith(self.decode(self._prefix_ids)):
            return ()
        return self._prefix_ids

    def literal(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Encode template text: special tokens parsed. ``first`` marks the start of the prompt (no guard)."""
        return self._encode(self._literal, text, first)

    def plain(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Encode content: nothing in it is parsed as a special or added token."""
        ids = self._encode(self._plain, text, first)
        if not self.is_plain(ids):  # a vocabulary that spells control tokens as ordinary pieces
            ids = tuple(i for part in _split_specials(text, self.added) for i in self._encode(self._plain, part, False))
        return ids

    def chunk(self, text: str) -> tuple[int, ...] | None:
        """Ids of a chunk wherever it stands, or None if this tokenizer does not give its text back."""
        return self._memo(text)

    def _chunk(self, text: str) -> tuple[int, ...] | None:
        ids = self.plain(text)
        exact = self.is_plain(ids) and self._text_of_span(ids) == text
        return ids if exact else None

    def has_added_token(self, text: str) -> bool:
        """Whether any added token is spelled out in ``text``."""
        return any(token in text for token in self.added)

    def is_plain(self, ids: tuple[int, ...]) -> bool:
        """Whether no id is a special token."""
        return self._special_ids.isdisjoint(ids)

    def _text_of_span(self, ids: tuple[int, ...]) -> str:
        if not self._guard:
            return self.decode(ids)
        lead = tuple(self._plain.encode(self._guard, add_special_tokens=False).ids)
        return self.decode(lead + ids)[len(self.decode(lead)) :]

    def prefix_text(self, ids: tuple[int, ...]) -> str:
        """The text of the first tokens of a chunk (for cut-off chunks)."""
        return self._text_of_span(ids)

    def _encode(self, tok: Tokenizer, text: str, first: bool) -> tuple[int, ...]:
        if not text:
            return ()
        if first or not self._guard:
            return tuple(_ids(tok, text))
        lead = _ids(tok, self._guard)
        ids = _ids(tok, self._guard + text)
        if ids[: len(lead)] == lead:
            return tuple(ids[len(lead) :])
        return tuple(_ids(tok, text))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except TypeError as error:  # what it says of a str that has no UTF-8 form
        raise UsageError(
            "the text holds an unpaired surrogate (half a character)",
            hint="it was cut or decoded wrongly on its way; text.encode('utf-8', 'replace').decode() drops it",
        ) from error


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = []
    state["post_processor"] = None
    return Tokenizer.from_str(json.dumps(state))


def _split_specials(text: str, added: tuple[str, ...]) -> list[str]:
    """Cut every spelled-out control token in the middle, so that no piece can be one."""
    parts = [text]
    for token in added:
        cut: list[str] = []
        for part in parts:
            pieces = part.split(token)
            for index, piece in enumerate(pieces):
                cut.append(piece if index == 0 else token[len(token) // 2 :] + piece)
                if index < len(pieces) - 1:
                    cut[-1] += token[: len(token) // 2]
        parts = cut
    return parts
