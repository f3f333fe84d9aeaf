"""Warm-up from what LangChain holds: documents, vector stores, retrievers, splitter pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag import KVBoost, SourceChunk, WarmReport
from kvboost_rag.errors import UsageError
from langchain_kvboost_rag._fields import KVBoostFields


def warm_documents(llm: KVBoostFields | KVBoost, documents: Iterable[Document | str], **options: Any) -> WarmReport:
    """Compute and store the KV of every document's text, exactly as a retriever will return it.

    ``options`` are those of :meth:`kvboost_rag.KVBoost.warm` (``head``, ``progress``, ``shard``, ``batch_tokens``).
    Give the documents *after* splitting: whole files are no chunks.
    """
    engine = llm if isinstance(llm, KVBoost) else llm.engine_for()
    return engine.warm((_source(d) for d in documents), **options)


def _source(document: Document | str) -> SourceChunk:
    if isinstance(document, str):
        return SourceChunk(document)
    if not isinstance(document, Document):
        raise UsageError(f"a {type(document).__name__} is no Document", hint="pass Documents or strings")
    origin = str(document.metadata.get("source", "") or "")
    return SourceChunk(document.page_content, source=origin, id=document.id or "", metadata=document.metadata)


def warm_vectorstore(llm: KVBoostFields | KVBoost, vectorstore: Any, **options: Any) -> WarmReport:
    """Warm everything that a vector store, a document store or a retriever over one holds.

    Known: ``InMemoryVectorStore``, FAISS, Chroma, stores with ``mget``/``yield_keys`` (the parents of a
    ParentDocumentRetriever), and retrievers with a ``docs`` list (BM25, TF-IDF) or a ``vectorstore``.

    Raises:
        UsageError: this store cannot be read out; hand the documents to :func:`warm_documents`.
    """
    return warm_documents(llm, stored_documents(vectorstore), **options)


def stored_documents(store: Any) -> Iterator[Document | str]:
    """Every text that ``store`` can return.

    Raises:
        UsageError: there is no known way to list them.
    """
    parents = getattr(store, "docstore", None)  # a parent retriever returns parents, not what was embedded
    if _is_key_value(parents) and hasattr(store, "child_splitter"):
        yield from stored_documents(parents)
    elif isinstance(store, InMemoryVectorStore):
        yield from (entry["text"] for entry in store.store.values())
    elif _is_key_value(store):
        yield from (d for d in store.mget(list(store.yield_keys())) if isinstance(d, Document))
    elif isinstance(getattr(parents, "_dict", None), dict):  # FAISS over an in-memory docstore
        yield from parents._dict.values()  # type: ignore[union-attr]
    elif isinstance(getattr(store, "docs", None), (list, tuple)):
        yield from store.docs
    elif getattr(store, "vectorstore", None) is not None:
        yield from stored_documents(store.vectorstore)
    elif hasattr(store, "_collection") and hasattr(store, "get"):  # Chroma
        yield from store.get(include=["documents"])["documents"]
    else:
        raise UsageError(
            f"the texts of a {type(store).__name__} cannot be listed", hint="use warm_documents(llm, documents)"
        )


def _is_key_value(store: Any) -> bool:
    return hasattr(store, "mget") and hasattr(store, "yield_keys")


class KVBoostWarmer(BaseDocumentTransformer):
    """A step at the end of an ingest pipeline: computes the KV of each document, and hands the documents on unchanged.

    ::

        chunks = KVBoostWarmer(llm).transform_documents(splitter.split_documents(documents))
        vectorstore.add_documents(chunks)

    ``last_report`` is the report of the latest run. ``options`` are those of :func:`warm_documents`.
    """

    def __init__(self, llm: KVBoostFields | KVBoost, **options: Any) -> None:
        self.llm = llm
        self.options = options
        self.last_report: WarmReport | None = None

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Warm and return ``documents``."""
        self.last_report = warm_documents(self.llm, documents, **{**self.options, **kwargs})
        return documents
