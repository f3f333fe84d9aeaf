"""Pass-through steps that tell the engine what was retrieved: a retriever around a retriever, and a compressor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    Callbacks,
)
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from langchain_kvboost_rag._fields import KVBoostFields
from langchain_kvboost_rag._known import retrieved_texts
from langchain_kvboost_rag.warm import warm_documents


def register_documents(llm: KVBoostFields, documents: Sequence[Document], *, warm: bool = False) -> list[str]:
    """Tell the engine behind ``llm`` that these texts are chunks, so that even their first appearance in a prompt is
    kept apart and stored. ``warm`` computes what is missing now instead of after the answer. Returns the texts."""
    kept = retrieved_texts(llm.engine_for()).add(d.page_content for d in documents)
    if warm and kept:
        warm_documents(llm, kept)
    return kept


class KVBoostRetriever(BaseRetriever):
    """``base`` with its results registered (see :func:`register_documents`), in ``base``'s order.

    ``k`` cuts the results, also per call (``invoke(query, k=2)``); other options of a call go to ``base``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    base: BaseRetriever
    llm: KVBoostFields
    k: int | None = None
    warm: bool = False

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        documents = self.base.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return self._registered(documents, k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        documents = await self.base.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return await asyncio.to_thread(self._registered, documents, k)

    def _registered(self, documents: list[Document], k: int | None) -> list[Document]:
        limit = self.k if k is None else k
        kept = documents if limit is None else documents[:limit]
        register_documents(self.llm, kept, warm=self.warm)
        return kept


class KVBoostCompressor(BaseDocumentCompressor):
    """The last step of a compressor pipeline: registers the documents that are left, changes nothing."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: KVBoostFields
    warm: bool = False

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> Sequence[Document]:
        """Register and return ``documents``."""
        register_documents(self.llm, documents, warm=self.warm)
        return documents
