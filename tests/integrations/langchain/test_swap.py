"""The plain swap: LangChain's own RAG code, with the model's line changed and nothing else.

Each path is asked twice, the second time with the retrieved documents in another order. All of them must hit, and the
tokens that the model really ran must be far fewer than the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import before_model, dynamic_prompt
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool

from kvboost_rag import KVBoost
from langchain_kvboost_rag import ChatKVBoost, KVBoostLLM, register_retrieved, warm_documents, warm_vectorstore
from tests.integrations.langchain.corpus import QUESTION, BM25Retriever, Turned, minilm_store
from tests.integrations.langchain.scripted import scripted_engine

Ask = Callable[[BaseLanguageModel, BaseRetriever], Any]
# Glue and the question are a third of such short prompts (three paragraphs); repair adds at most 15 %.
FORWARDED = 0.6
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from the context.\n\n{context}"), ("human", "{input}")])


class Reports(BaseCallbackHandler):
    """Collects the report of every answer, as a tracer would see it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        generation = response.generations[0][0]
        message = getattr(generation, "message", None)
        info = message.response_metadata if message is not None else generation.generation_info
        self.seen.append(info["kvboost"])


def format_docs(docs: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


def retrieval_chain(llm: Any, retriever: BaseRetriever) -> Any:
    return create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT)).invoke({"input": QUESTION})


def retrieval_chain_with_sources(llm: Any, retriever: BaseRetriever) -> Any:
    shown = PromptTemplate.from_template("Source: {source}\n{page_content}")
    stuff = create_stuff_documents_chain(llm, PROMPT, document_prompt=shown)
    return create_retrieval_chain(retriever, stuff).invoke({"input": QUESTION})


def lcel(llm: Any, retriever: BaseRetriever) -> Any:
    chain = {"context": retriever | format_docs, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()
    return chain.invoke(QUESTION)


def retrieval_qa(llm: Any, retriever: BaseRetriever) -> Any:
    return RetrievalQA.from_chain_type(llm, chain_type="stuff", retriever=retriever).invoke({"query": QUESTION})


def retrieval_qa_from_llm(llm: Any, retriever: BaseRetriever) -> Any:
    return RetrievalQA.from_llm(llm, retriever=retriever).invoke({"query": QUESTION})


def history_aware(llm: Any, retriever: BaseRetriever) -> Any:
    rephrase = ChatPromptTemplate.from_messages(
        [("system", "Rephrase the question."), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    # The rephrased question is the model's own; the retriever gets the original, so that the documents stay the same.
    aware = create_history_aware_retriever(llm, RunnableLambda(lambda _: QUESTION) | retriever, rephrase)
    answer = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer from the context.\n\n{context}"),
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
        ]
    )
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(llm, answer))
    history = [HumanMessage("Tell me about the lighthouse."), AIMessage("It stands on the northern cliff.")]
    return chain.invoke({"input": "When was it built?", "chat_history": history})


class Fixed(BaseRetriever):
    """Answers every query with what the base finds for the question: rephrasings are the model's own."""

    base: BaseRetriever

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.base.invoke(QUESTION)


def conversational(llm: Any, retriever: BaseRetriever) -> Any:
    chain = ConversationalRetrievalChain.from_llm(llm, retriever=Fixed(base=retriever))
    return chain.invoke({"question": "When was it built?", "chat_history": [("What stands there?", "A lighthouse.")]})


def multi_query(llm: Any, retriever: BaseRetriever) -> Any:
    many = MultiQueryRetriever.from_llm(Fixed(base=retriever), llm, include_original=True)
    return retrieval_chain(llm, many)


def agent_with_dynamic_prompt(llm: Any, retriever: BaseRetriever) -> Any:
    @dynamic_prompt
    def with_context(request: Any) -> str:
        return f"Use the following context in your response:\n\n{format_docs(retriever.invoke(QUESTION))}"

    return create_agent(llm, [], middleware=[with_context]).invoke({"messages": [("human", QUESTION)]})


def agent_with_context_in_the_query(llm: Any, retriever: BaseRetriever) -> Any:
    @before_model
    def with_context(state: Any, runtime: Any) -> dict[str, Any]:
        last = state["messages"][-1]
        context = format_docs(retriever.invoke(QUESTION))
        text = f"{last.content}\n\nUse the following context to answer the query:\n{context}"
        return {"messages": [last.model_copy(update={"content": text})]}

    return create_agent(llm, [], middleware=[with_context]).invoke({"messages": [("human", QUESTION)]})


def after_tool(llm: Any, search: Any) -> Any:
    """The messages of an agent's second step; the call itself is written here, a small model would not decide on it."""
    call = {"name": search.name, "args": {"query": QUESTION}, "id": "call00001", "type": "tool_call"}
    messages = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), search.invoke(call)]
    return llm.bind_tools([search]).invoke(messages)


def retriever_tool(llm: Any, retriever: BaseRetriever) -> Any:
    kind = "content_and_artifact"
    return after_tool(llm, create_retriever_tool(retriever, "search", "Search the guide.", response_format=kind))


def tutorial_tool(llm: Any, retriever: BaseRetriever) -> Any:
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, list[Document]]:
        """Search the guide."""
        found = retriever.invoke(query)
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    return after_tool(llm, search)


def tool_with_blocks(llm: Any, retriever: BaseRetriever) -> Any:
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[list[dict[str, str]], list[Document]]:
        """Search the guide."""
        found = retriever.invoke(query)
        return [{"type": "text", "text": d.page_content} for d in found], found

    return after_tool(llm, search)


PATHS: dict[str, Ask] = {
    f.__name__: f
    for f in (
        retrieval_chain,
        retrieval_chain_with_sources,
        lcel,
        retrieval_qa,
        retrieval_qa_from_llm,
        history_aware,
        conversational,
        multi_query,
        agent_with_dynamic_prompt,
        agent_with_context_in_the_query,
        retriever_tool,
        tutorial_tool,
        tool_with_blocks,
    )
}


def ask_twice(ask: Ask, llm: Any, retriever: BaseRetriever) -> list[dict[str, Any]]:
    """The last report (of the answer, not of a rephrasing) of both runs; the second with turned documents."""
    out = []
    for source in (retriever, Turned(base=retriever)):
        reports = Reports()
        ask(llm.model_copy(update={"callbacks": [reports]}), source)
        out.append(reports.seen[-1])
    return out


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def chat(request: pytest.FixtureRequest) -> ChatKVBoost:
    """Every path with a tiny model; with the real one among the slow tests."""
    if request.param == "tiny":
        return ChatKVBoost(engine=scripted_engine("In 1874."), max_tokens=12)
    return ChatKVBoost(engine=request.getfixturevalue("smol"), temperature=0, max_tokens=2)


@pytest.mark.parametrize("path", PATHS)
def test_after_warm_up_every_retrieved_chunk_hits_in_any_order(
    path: str, chat: ChatKVBoost, guide: list[Document]
) -> None:
    retriever = BM25Retriever.from_documents(guide)
    warm_documents(chat, retriever.invoke(QUESTION))
    for report in ask_twice(PATHS[path], chat, retriever):
        assert (report["hits"], report["misses"]) == (3, 0), report["chunks"]
        assert report["forwarded_tokens"] < FORWARDED * report["prompt_tokens"]
        assert report["warnings"] == []


@pytest.mark.parametrize("path", PATHS)
def test_without_warm_up_the_first_ask_stores_what_the_second_hits(
    path: str, chat: ChatKVBoost, guide: list[Document]
) -> None:
    with register_retrieved(chat):
        first, second = ask_twice(PATHS[path], chat, BM25Retriever.from_documents(guide))
    assert (first["hits"], first["misses"]) == (0, 3)
    assert first["stored_tokens"] > 0
    assert (second["hits"], second["misses"]) == (3, 0)
    assert second["forwarded_tokens"] < FORWARDED * second["prompt_tokens"]


def test_the_real_model_with_embeddings_and_a_vector_store(smol: KVBoost) -> None:
    chat = ChatKVBoost(engine=smol, temperature=0, max_tokens=2)
    store = minilm_store()
    retriever = store.as_retriever(search_kwargs={"k": 3})
    found = retriever.invoke(QUESTION)
    assert "1874" in found[0].page_content  # the retriever is a real one
    warm_documents(chat, found)
    for report in ask_twice(retrieval_chain, chat, retriever):
        assert (report["hits"], report["misses"]) == (3, 0)


def test_warm_vectorstore_covers_everything_the_store_can_return(guide: list[Document]) -> None:
    chat = ChatKVBoost(engine=scripted_engine("x"))
    report = warm_vectorstore(chat, minilm_store())
    assert report.chunks == len(guide)
    assert warm_vectorstore(chat, minilm_store()).stored == 0


def test_the_text_model_in_a_retrieval_qa(guide: list[Document]) -> None:
    llm = KVBoostLLM(engine=scripted_engine("In 1874."), max_tokens=12)
    retriever = BM25Retriever.from_documents(guide)
    warm_documents(llm, retriever.invoke(QUESTION))
    for report in ask_twice(retrieval_qa, llm, retriever):
        assert (report["hits"], report["misses"]) == (3, 0)


def test_reuse_off_forwards_the_whole_prompt(chat: ChatKVBoost, guide: list[Document]) -> None:
    retriever = BM25Retriever.from_documents(guide)
    warm_documents(chat, retriever.invoke(QUESTION))
    reports = ask_twice(lcel, chat.model_copy(update={"reuse": "off"}), retriever)
    for report in reports:
        assert report["forwarded_tokens"] == report["prompt_tokens"]
        assert report["hits"] == 0


@pytest.mark.slow
def test_the_answer_comes_from_the_documents(smol: KVBoost, guide: list[Document]) -> None:
    llm = ChatKVBoost(engine=smol, temperature=0, max_tokens=32)
    retriever = BM25Retriever.from_documents(guide, k=2)
    warm_documents(llm, retriever.invoke(QUESTION))
    assert "1874" in lcel(llm, retriever)
