"""Agents: a retriever tool whose documents travel as an artifact, through LangChain's own create_agent."""

from __future__ import annotations

import json
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import create_retriever_tool, tool
from pydantic import BaseModel

from langchain_kvboost_rag import ChatKVBoost
from tests.integrations.langchain.corpus import QUESTION, BM25Retriever, documents
from tests.integrations.langchain.scripted import ScriptedKVBoost, last_text, scripted_engine


def _search_then_answer(prompt: Any, options: dict[str, Any]) -> str:
    if last_text(prompt).startswith("Result"):
        return "In 1874."
    return '<tool_call>{"name": "search_guide", "arguments": {"query": "lighthouse built"}}</tool_call>'


def _agent(engine: ScriptedKVBoost, turned: bool = False) -> Any:
    retriever = BM25Retriever.from_documents(documents(), k=2, turned=turned)
    search = create_retriever_tool(
        retriever, "search_guide", "Search the town guide.", response_format="content_and_artifact"
    )
    return create_agent(ChatKVBoost(engine=engine, max_tokens=80), [search])


def _reports(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [m.response_metadata["kvboost"] for m in state["messages"] if isinstance(m, AIMessage)]


def test_documents_of_a_tool_are_chunks_without_any_registration() -> None:
    engine = scripted_engine(_search_then_answer)
    question = {"messages": [("human", QUESTION)]}
    first = _agent(engine).invoke(question)
    assert [type(m).__name__ for m in first["messages"]] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    tool_message = first["messages"][2]
    assert isinstance(tool_message, ToolMessage)
    assert len(tool_message.artifact) == 2
    assert first["messages"][-1].content == "In 1874."
    assert _reports(first)[1]["misses"] == 2

    second = _agent(engine, turned=True).invoke(question)
    assert (_reports(second)[1]["hits"], _reports(second)[1]["misses"]) == (2, 0)


def test_the_tutorials_tool_that_writes_sources_between_the_chunks() -> None:
    @tool(response_format="content_and_artifact")
    def search_guide(query: str) -> tuple[str, list[Document]]:
        """Search the town guide."""
        found = documents()[:2]
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    engine = scripted_engine(_search_then_answer)
    agent = create_agent(ChatKVBoost(engine=engine, max_tokens=80), [search_guide])
    agent.invoke({"messages": [("human", QUESTION)]})
    engine.forget()
    state = agent.invoke({"messages": [("human", "Again: " + QUESTION)]})
    assert (_reports(state)[1]["hits"], _reports(state)[1]["misses"]) == (2, 0)


def test_an_agent_streams_tokens_and_calls_like_it_invokes() -> None:
    agent = _agent(scripted_engine(_search_then_answer))
    texts, calls = [], []
    for chunk, _ in agent.stream({"messages": [("human", QUESTION)]}, stream_mode="messages"):
        if isinstance(chunk, AIMessage):
            texts.append(chunk.text)
            calls += [c["name"] for c in chunk.tool_calls if c["name"]]
    assert "".join(texts) == "In 1874."
    assert calls == ["search_guide"]


def test_structured_answers_of_agents_go_through_the_grammar() -> None:
    class Answer(BaseModel):
        year: int

    def script(prompt: Any, options: dict[str, Any]) -> str:
        if last_text(prompt).startswith("Result"):
            return json.dumps({"year": 1874})
        return json.dumps({"name": "search_guide", "arguments": {"query": "lighthouse"}})

    retriever = BM25Retriever.from_documents(documents(), k=1)
    search = create_retriever_tool(retriever, "search_guide", "Search the town guide.")
    llm = ChatKVBoost(engine=scripted_engine(script), max_tokens=80)
    state = create_agent(llm, [search], response_format=ProviderStrategy(Answer)).invoke(
        {"messages": [("human", QUESTION)]}
    )
    assert state["structured_response"] == Answer(year=1874)
