"""Warm-up from LlamaIndex's side: an ingestion step, and whole indexes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.kvboost_rag.base import KVBoostLLM
from llama_index.llms.kvboost_rag.retrieved import node_text

from kvboost_rag import WarmReport
from kvboost_rag.errors import UsageError


def warm_nodes(
    llm: KVBoostLLM, nodes: Iterable[BaseNode], *, head: str | None = None, progress: bool = False
) -> WarmReport:
    """Compute and store the blocks of nodes that the store lacks. Metadata lines are not part of a block.

    ``head``: also store blocks that are exact right after this system prompt.
    """
    texts = [text for node in nodes if (text := node_text(node))]
    return llm.engine.warm(texts, head=head, progress=progress)


def warm_index(llm: KVBoostLLM, index: Any, *, head: str | None = None, progress: bool = False) -> WarmReport:
    """Warm every node of an index: from its docstore, or from a vector store that keeps texts.

    Raises:
        UsageError: the index cannot list its nodes.
    """
    return warm_nodes(llm, _nodes_of(index), head=head, progress=progress)


def _nodes_of(index: Any) -> list[BaseNode]:
    nodes = [node for node in index.docstore.docs.values() if node.get_content(metadata_mode=MetadataMode.NONE).strip()]
    if nodes:
        return nodes
    try:
        found = index.vector_store.get_nodes(node_ids=None)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{type(index).__name__} cannot list its nodes (empty docstore, no get_nodes in the vector store)",
            hint="put KVBoostWarmer at the end of your IngestionPipeline, or call warm_nodes(llm, nodes)",
        ) from error
    return list(found)


class KVBoostWarmer(TransformComponent):
    """The last step of an ``IngestionPipeline``: warms the nodes and hands them on unchanged.

    ``report`` is the latest :class:`~kvboost_rag.WarmReport`. A pipeline's own cache skips this step for nodes that it
    has seen: after clearing a KV store, clear that cache too. Keep ``num_workers`` at 1: each worker is a process
    that would load the model.
    """

    llm: KVBoostLLM
    head: str | None = Field(
        default=None, description="Also store blocks that are exact right after this system prompt."
    )
    show_progress: bool = False

    _report: WarmReport | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised form."""
        return "KVBoostWarmer"

    @property
    def report(self) -> WarmReport | None:
        """What the latest run did."""
        return self._report

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm ``nodes``."""
        show = self.show_progress or bool(kwargs.get("show_progress"))
        self._report = warm_nodes(self.llm, nodes, head=self.head, progress=show)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm ``nodes`` in a thread."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)
