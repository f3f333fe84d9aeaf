"""A node postprocessor that names what will stand in the prompt."""

from __future__ import annotations

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.kvboost_rag.base import KVBoostLLM
from llama_index.llms.kvboost_rag.retrieved import node_text


class KVBoostPostprocessor(BaseNodePostprocessor):
    """Registers the nodes with the LLM and hands them on unchanged. Put it last.

    Needed only where the texts that a retriever returns are not those that reach the prompt (sentence windows,
    compression, redaction), or with ``KVBoostLLM(watch=False)``.
    """

    llm: KVBoostLLM

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised form."""
        return "KVBoostPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.llm.register_retrieved([node_text(n.node) for n in nodes])
        return nodes
