"""``register_retrieved``: documents of any retriever become known chunks, without a change to the chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from langchain_kvboost_rag._fields import KVBoostFields
from langchain_kvboost_rag._known import retrieved_texts
from langchain_kvboost_rag.retriever import register_documents


class RetrievedDocumentsHandler(BaseCallbackHandler):
    """Registers what retrievers return. Pass it as a callback, or use :func:`register_retrieved`.

    ``documents`` counts what was seen, ``answers`` the model calls after a retrieval.
    """

    raise_error = False

    def __init__(self, llm: KVBoostFields) -> None:
        self.llm = llm
        self.documents = 0
        self.answers = 0
        self.found = 0
        self._waiting: list[str] = []

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """Documents came out of a retriever."""
        self.documents += len(documents)
        self._waiting += register_documents(self.llm, documents)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A chat model is about to be called."""
        self._asked([str(m.text) for batch in messages for m in batch])

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        """A text model is about to be called."""
        self._asked(prompts)

    def _asked(self, contents: list[str]) -> None:
        if self._waiting:
            self.answers += 1
            self.found += sum(any(text in c for c in contents) for text in self._waiting)

    def conclude(self) -> None:
        """At the end: one warning if documents were retrieved, the model was asked, and none ever reached it."""
        if self.answers and not self.found:
            retrieved_texts(self.llm.engine_for()).warn("unknown", len(self._waiting))


_HANDLER: ContextVar[RetrievedDocumentsHandler | None] = ContextVar("kvboost_retrieved", default=None)
register_configure_hook(_HANDLER, inheritable=True)


@contextmanager
def register_retrieved(llm: KVBoostFields) -> Iterator[RetrievedDocumentsHandler]:
    """While the ``with`` block runs, documents of any retriever are registered as chunks of ``llm``'s engine.

    Works for ``invoke``, ``ainvoke``, ``batch`` and streams; not in threads that you start yourself (a context does
    not follow there: pass ``callbacks=[RetrievedDocumentsHandler(llm)]``). If documents were retrieved and none stands
    verbatim in a prompt, one warning names the likely cause and what helps.
    """
    handler = RetrievedDocumentsHandler(llm)
    token = _HANDLER.set(handler)
    try:
        yield handler
        handler.conclude()
    finally:
        _HANDLER.reset(token)
