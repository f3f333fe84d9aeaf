"""Texts that were retrieved: which of them stand in a prompt, and why they do not."""

from __future__ import annotations

import html
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from kvboost_rag import KVBoost

log = logging.getLogger("langchain_kvboost_rag")

MIN_CHARS = 32  # shorter texts are no chunks worth a block
MOST_TEXTS = 1024
_HEAD = 60  # characters that are enough to recognise a text by

_CAUSES = {
    "repr": (
        "they stand there as the repr of a Python list or Document",
        'join them first: "\\n\\n".join(d.page_content for d in documents)',
    ),
    "html": (
        "they stand there HTML-escaped, as mustache's {{context}} does",
        "write {{{context}}} in the template, or use an f-string template",
    ),
    "cut": (
        "they are cut off",
        "leave room for whole chunks: fewer of them, or a larger context window",
    ),
    "space": (
        "their white space was changed",
        "pass page_content as it is, or split and store the text in the form in which it is sent",
    ),
    "unknown": (
        "something between retriever and model changed or dropped them (a compressor, a redaction, another language)",
        "put the retriever wrapper after the step that changes them",
    ),
}


class RetrievedTexts:
    """The newest retrieved texts of one engine. Safe from several threads; a found text costs nothing but memory."""

    def __init__(self, limit: int = MOST_TEXTS) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()
        self._limit = limit
        self._lock = threading.Lock()
        self._warned = False

    def add(self, texts: Iterable[str]) -> list[str]:
        """Remember ``texts``; returns those that are long enough to be chunks, stripped."""
        kept = [s for t in texts if len(s := t.strip()) >= MIN_CHARS]
        with self._lock:
            for text in kept:
                self._texts[text] = None
                self._texts.move_to_end(text)
            while len(self._texts) > self._limit:
                self._texts.popitem(last=False)
        return kept

    def __len__(self) -> int:
        return len(self._texts)

    def found_in(self, contents: Sequence[str], more: Iterable[str] = ()) -> list[str]:
        """Known texts, and of ``more``, that stand verbatim in one of ``contents``."""
        with self._lock:
            known = list(self._texts)
        named = [s for t in more if len(s := t.strip()) >= MIN_CHARS]
        return [t for t in dict.fromkeys([*named, *known]) if any(t in c for c in contents)]

    def diagnose(self, contents: Sequence[str], texts: Sequence[str] = ()) -> str | None:
        """The name of what happened to texts that are in ``contents``, but not verbatim; None without evidence."""
        with self._lock:
            known = [*texts, *self._texts] if not texts else list(texts)
        return next((cause for t in known for c in contents if (cause := _cause(t, c))), None)

    def warn(self, cause: str, count: int) -> None:
        """Tell once per engine that retrieved texts were not found, why, and what helps."""
        with self._lock:
            if self._warned:
                return
            self._warned = True
        reason, fix = _CAUSES[cause]
        log.warning(
            "none of %d retrieved chunks stands verbatim in the prompt: %s. To reuse them: %s", count, reason, fix
        )


def _cause(text: str, content: str) -> str | None:
    """How ``text`` stands in ``content``, if changed."""
    if text in content:
        return None
    forms = {"repr": repr(text)[1:-1], "html": html.escape(text)}
    for cause, form in forms.items():
        changed = _common(text, form)  # where the two forms part: a piece around it tells them apart
        if form != text and form[max(0, changed - _HEAD) : changed + _HEAD // 2] in content:
            return cause
    if text[:_HEAD] in content:
        return "cut"
    if " ".join(text.split())[: _HEAD * 2] in " ".join(content.split()):
        return "space"
    return None


def _common(first: str, second: str) -> int:
    n = min(len(first), len(second))
    return next((i for i in range(n) if first[i] != second[i]), n)


_BY_ENGINE: WeakKeyDictionary[KVBoost, RetrievedTexts] = WeakKeyDictionary()
_LOCK = threading.Lock()


def retrieved_texts(engine: KVBoost) -> RetrievedTexts:
    """What was retrieved for this engine; every LLM object over it shares it."""
    with _LOCK:
        if engine not in _BY_ENGINE:
            _BY_ENGINE[engine] = RetrievedTexts()
        return _BY_ENGINE[engine]


def chunks_in(
    engine: KVBoost, contents: Sequence[str], documents: Sequence[str], named: Sequence[str] = ()
) -> list[str]:
    """Chunks to name to the engine for a prompt made of ``contents``: documents that travel with its messages, texts
    retrieved lately, and ``named`` ones (these are passed on even if they are not found: the engine then says so)."""
    known = retrieved_texts(engine)
    found = known.found_in(contents, documents)
    if not found:
        own = [s for t in documents if len(s := t.strip()) >= MIN_CHARS]
        if own or len(known):
            cause = known.diagnose(contents, own)
            if cause:
                known.warn(cause, len(own) or len(known))
    return [*dict.fromkeys([*(s for t in named if (s := t.strip())), *found])]
