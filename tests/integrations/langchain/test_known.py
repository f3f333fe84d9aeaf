"""Documents that become known: warm-up, retriever wrapper, compressor, callback; and the one warning."""

from __future__ import annotations

import asyncio
import html
import logging
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvboost_rag.errors import UsageError
from langchain_kvboost_rag import (
    ChatKVBoost,
    KVBoostCompressor,
    KVBoostRetriever,
    KVBoostWarmer,
    RetrievedDocumentsHandler,
    register_documents,
    register_retrieved,
    warm_documents,
    warm_vectorstore,
)
from tests.integrations.langchain.corpus import QUESTION, BM25Retriever, documents
from tests.integrations.langchain.scripted import ScriptedKVBoost, scripted_engine


@pytest.fixture
def engine() -> ScriptedKVBoost:
    return scripted_engine("In 1874.")


@pytest.fixture
def llm(engine: ScriptedKVBoost) -> ChatKVBoost:
    return ChatKVBoost(engine=engine, max_tokens=12)


@pytest.fixture
def retriever() -> BM25Retriever:
    return BM25Retriever.from_documents(documents(), k=2)


def chain(retriever: Any, llm: Runnable[LanguageModelInput, Any], join: Any = None) -> Any:
    prompt = ChatPromptTemplate.from_messages([("system", "Use this:\n\n{context}"), ("human", "{input}")])
    joined = join or (lambda docs: "\n\n".join(d.page_content for d in docs))
    return {"context": retriever | joined, "input": RunnablePassthrough()} | prompt | llm


def outcome(message: Any) -> tuple[int, int]:
    report = message.response_metadata["kvboost"]
    return report["hits"], report["misses"]


class TestRetriever(RetrieversIntegrationTests):
    """LangChain's standard suite for retrievers, over the wrapper."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return KVBoostRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        base = BM25Retriever.from_documents(documents(), k=5)
        return {"base": base, "llm": ChatKVBoost(engine=scripted_engine("x"))}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


# --- warm-up ------------------------------------------------------------------------------------------------


def test_a_warmer_ends_an_ingest_pipeline_and_changes_nothing(llm: ChatKVBoost, engine: ScriptedKVBoost) -> None:
    splitter = RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=80)
    chunks = splitter.split_documents(documents()[:2])
    warmer = KVBoostWarmer(llm)
    assert warmer.transform_documents(chunks) == chunks
    assert warmer.last_report is not None
    assert warmer.last_report.stored == len(chunks)
    assert asyncio.run(warmer.atransform_documents(chunks)) == chunks
    assert warmer.last_report.skipped == len(chunks)


def test_documents_and_strings_can_be_warmed_and_nothing_else(llm: ChatKVBoost) -> None:
    assert warm_documents(llm, [documents()[0], documents()[1].page_content]).stored == 2
    with pytest.raises(UsageError, match="Document"):
        warm_documents(llm, [3])  # type: ignore[list-item]


def test_stores_that_can_be_read_out(llm: ChatKVBoost, retriever: BM25Retriever) -> None:
    parents: InMemoryStore = InMemoryStore()
    parents.mset([("a", documents()[0]), ("b", documents()[1])])
    assert warm_vectorstore(llm, parents).stored == 2
    report = warm_vectorstore(llm, retriever)
    assert report.chunks == len(retriever.docs)
    with pytest.raises(UsageError, match="warm_documents"):
        warm_vectorstore(llm, object())


# --- registration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_the_wrapper_makes_the_first_sight_count(warm: bool, llm: ChatKVBoost, retriever: BM25Retriever) -> None:
    first = chain(KVBoostRetriever(base=retriever, llm=llm, warm=warm), llm).invoke(QUESTION)
    assert outcome(first) == ((2, 0) if warm else (0, 2))
    turned = chain(KVBoostRetriever(base=retriever.model_copy(update={"turned": True}), llm=llm), llm)
    assert outcome(turned.invoke(QUESTION)) == (2, 0)


async def test_the_wrapper_is_async_too(llm: ChatKVBoost, retriever: BM25Retriever) -> None:
    assert outcome(await chain(KVBoostRetriever(base=retriever, llm=llm), llm).ainvoke(QUESTION)) == (0, 2)


def test_the_compressor_passes_documents_through(llm: ChatKVBoost, retriever: BM25Retriever) -> None:
    from langchain_classic.retrievers import ContextualCompressionRetriever

    compressed = ContextualCompressionRetriever(base_compressor=KVBoostCompressor(llm=llm), base_retriever=retriever)
    assert compressed.invoke(QUESTION) == retriever.invoke(QUESTION)
    assert outcome(chain(compressed, llm).invoke(QUESTION)) == (0, 2)


def test_the_callback_registers_in_every_way_to_run(llm: ChatKVBoost, engine: ScriptedKVBoost, retriever: Any) -> None:
    plain = chain(retriever, llm)
    assert outcome(plain.invoke(QUESTION)) == (0, 0)  # nobody told, nothing known
    engine.forget()
    with register_retrieved(llm) as seen:
        assert outcome(plain.invoke(QUESTION)) == (0, 2)
        assert outcome(asyncio.run(plain.ainvoke(QUESTION))) == (2, 0)
        assert [outcome(m) for m in plain.batch([QUESTION, QUESTION])] == [(2, 0)] * 2
        chunks = list(plain.stream(QUESTION))
        assert chunks[-1].response_metadata["kvboost"]["hits"] == 2
    assert seen.documents == 10
    before = len(engine.options)
    plain.invoke("Who is the director of the museum?")
    assert seen.documents == 10  # not any more
    assert len(engine.options) == before + 1


def test_the_handler_can_be_passed_by_hand(llm: ChatKVBoost, retriever: BM25Retriever) -> None:
    handler = RetrievedDocumentsHandler(llm)
    assert outcome(chain(retriever, llm).invoke(QUESTION, {"callbacks": [handler]})) == (0, 2)


def test_only_texts_that_stand_in_the_prompt_are_named(llm: ChatKVBoost, engine: ScriptedKVBoost) -> None:
    register_documents(llm, documents())
    text = documents()[3].page_content
    report = llm.invoke([("system", text), ("human", "?")]).response_metadata["kvboost"]
    assert engine.options[-1]["chunks"] == [text]
    assert report["warnings"] == []


def test_other_engines_know_nothing_of_it(llm: ChatKVBoost) -> None:
    register_documents(llm, documents())
    other = scripted_engine("x")
    ChatKVBoost(engine=other).invoke([("system", documents()[3].page_content), ("human", "?")])
    assert other.options[-1]["chunks"] == []


def test_short_texts_are_no_chunks(llm: ChatKVBoost) -> None:
    assert register_documents(llm, [Document("Yes."), Document(" ")]) == []


# --- the one warning ----------------------------------------------------------------------------------------


def _cut(docs: list[Document]) -> str:
    return "\n\n".join(d.page_content[:150] for d in docs)


JOINS: dict[str, tuple[Any, str]] = {
    "repr of a list": (str, "repr"),
    "repr of texts": (lambda docs: str([d.page_content for d in docs]), "repr"),
    "html": (lambda docs: "\n\n".join(html.escape(d.page_content) for d in docs), "HTML"),
    "cut": (_cut, "cut off"),
    "white space": (lambda docs: "\n\n".join(d.page_content.replace(" ", "  ") for d in docs), "white space"),
    "another text": (lambda docs: "A summary of everything that was found in the guide.", "changed or dropped"),
}


@pytest.mark.parametrize("name", JOINS)
def test_one_warning_names_the_cause_and_the_fix(name: str, llm: ChatKVBoost, caplog: pytest.LogCaptureFixture) -> None:
    join, words = JOINS[name]
    odd = [
        Document(f"{d.page_content}\nIt's the town's \"best\" & only one, they say." + "\n<end>") for d in documents()
    ]
    retriever = BM25Retriever.from_documents(odd, k=2)
    with caplog.at_level(logging.WARNING, "langchain_kvboost_rag"), register_retrieved(llm):
        for _ in range(3):
            chain(retriever, llm, join).invoke(QUESTION)
    told = [r.getMessage() for r in caplog.records if r.name == "langchain_kvboost_rag"]
    assert len(told) == 1, told
    assert words in told[0]
    assert "To reuse them:" in told[0]


def test_no_warning_where_all_is_well(llm: ChatKVBoost, retriever: Any, caplog: pytest.LogCaptureFixture) -> None:
    with register_retrieved(llm):
        llm.invoke("Rephrase: when was it built?")  # a call without documents, before and after
        chain(retriever, llm).invoke(QUESTION)
        llm.invoke("Thanks.")
    assert [r for r in caplog.records if r.name == "langchain_kvboost_rag"] == []


def test_a_tool_whose_documents_are_the_repr_of_a_list(llm: ChatKVBoost, caplog: pytest.LogCaptureFixture) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    found = [Document("One line of the guide that is long enough.\nAnd another line of it, as guides have.")]
    call = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    llm.invoke([HumanMessage("q"), call, ToolMessage(str(found), tool_call_id="1", artifact=found)])
    assert "repr" in caplog.text
