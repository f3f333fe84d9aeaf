"""What was retrieved lately: texts that the next prompts will probably hold, and why they do not stand there.

Retrievers tell of their nodes by an event; texts that then stand verbatim in a prompt are named to the engine, which
computes each once and finds it by itself ever after. Detection is by content, so it can only ever cost or save time.
"""

from __future__ import annotations

import html
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import llama_index.core.instrumentation as instrument
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode

LEAST_CHARS = 32  # shorter texts are not worth a block, and the engine's index does not keep them
MOST_TEXTS = 256
_UNESCAPE = (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\'", "'"), ('\\"', '"'), ("\\\\", "\\"))

CAUSES = {
    "repr": (
        "stand escaped in the prompt (\\n for line ends): a list or node was turned into a string with str()",
        "response mode simple_summarize does this; wrap its template in verbatim_context(...), or use compact or "
        "KVBoostSynthesizer; in your own code join node.get_content() with '\\n\\n'",
    ),
    "html": (
        "stand HTML-escaped in the prompt (&amp; for &)",
        "turn the escaping of your template engine off for the context",
    ),
    "space": (
        "stand in the prompt with other white space",
        "leave node texts as they are, or warm and index the text that you put into the prompt",
    ),
    "cut": (
        "were cut when the context was packed into the window",
        "call llm.set_global_tokenizer() so that LlamaIndex counts this model's tokens, retrieve fewer or smaller "
        "nodes, or use KVBoostSynthesizer, which never cuts a node",
    ),
}


class ReuseWarning(UserWarning):
    """Retrieved nodes do not stand verbatim in the prompt, so that they cost a prefill."""


def node_text(node: BaseNode) -> str:
    """The text of a node that stands in prompts; its metadata lines are not part of it."""
    return node.get_content(metadata_mode=MetadataMode.NONE).strip()


class RetrievedTexts:
    """Texts retrieved and not yet answered from; bounded, the oldest go first. Safe from several threads."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, texts: Iterable[str]) -> None:
        """Remember texts; short ones are left out."""
        with self._lock:
            for text in (t.strip() for t in texts):
                if len(text) >= LEAST_CHARS:
                    self._texts[text] = None
                    self._texts.move_to_end(text)
            while len(self._texts) > MOST_TEXTS:
                self._texts.popitem(last=False)

    def standing_in(self, prompt: str) -> list[str]:
        """The texts that stand verbatim in ``prompt``; warns once per cause about those that stand there changed."""
        with self._lock:
            texts = list(self._texts)
        found = [text for text in texts if text in prompt]
        if len(found) < len(texts):
            self._warn([text for text in texts if text not in prompt], found, prompt)
        return found

    def settle(self, texts: Iterable[str]) -> None:
        """Forget texts that the engine knows by now."""
        with self._lock:
            for text in texts:
                self._texts.pop(text, None)

    def _warn(self, missing: Sequence[str], found: Sequence[str], prompt: str) -> None:
        causes = find_causes(missing, found, prompt)
        for cause in {c for c in causes if c} - self._warned:
            self._warned.add(cause)
            what, fix = CAUSES[cause]
            number = causes.count(cause)
            message = f"{number} of {len(missing) + len(found)} retrieved nodes {what} and are not reused. Fix: {fix}."
            warnings.warn(message, ReuseWarning, stacklevel=2)

    # An LLM is copied and pickled with what it holds; copies watch the same retrievals.
    def __deepcopy__(self, memo: object) -> RetrievedTexts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (RetrievedTexts, ())


def find_causes(missing: Sequence[str], found: Sequence[str], prompt: str) -> list[str | None]:
    """Per text that is not in ``prompt``: the key of :data:`CAUSES`, or None where there is no trace of it."""
    rest = prompt
    for text in found:
        rest = rest.replace(text, "\0")
    plain = rest
    for escaped, character in _UNESCAPE:
        plain = plain.replace(escaped, character)
    unescaped, spaced = html.unescape(rest), " ".join(rest.split())
    return [_cause(text, rest, plain, unescaped, spaced) for text in missing]


def _cause(text: str, rest: str, plain: str, unescaped: str, spaced: str) -> str | None:
    if text in plain:
        return "repr"
    if text in unescaped:
        return "html"
    if " ".join(text.split()) in spaced:
        return "space"
    edge = max(LEAST_CHARS, len(text) // 8)
    if len(text) > edge and (text[:edge] in rest or text[-edge:] in rest):
        return "cut"
    return None


_WATCHERS: WeakSet[RetrievedTexts] = WeakSet()


class _RetrievalHandler(BaseEventHandler):
    """Hands the nodes of every retriever to every watcher of this process."""

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostRetrievalHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, (RetrievalEndEvent, ReRankEndEvent)):
            texts = [node_text(n.node) for n in event.nodes]
            for watcher in list(_WATCHERS):
                watcher.add(texts)


def watch_retrievals(watcher: RetrievedTexts) -> None:
    """Let ``watcher`` (held weakly) know what any retriever of this process returns."""
    root = instrument.get_dispatcher("root")  # type: ignore[attr-defined]
    if not any(isinstance(handler, _RetrievalHandler) for handler in root.event_handlers):
        root.add_event_handler(_RetrievalHandler())
    _WATCHERS.add(watcher)
