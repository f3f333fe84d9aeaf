"""Every chat engine, sync and async, streamed or not, over two turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.callbacks import TokenCountingHandler
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.kvboost_rag import KVBoostLLM

from tests.integrations.llama_index.corpus import QUESTION, ListRetriever, make_nodes

Make = Callable[[ListRetriever, KVBoostLLM], Any]
ENGINES: dict[str, tuple[Make, bool, int]] = {  # name → (make, has nodes, calls of both turns)
    "simple": (lambda r, llm: SimpleChatEngine.from_defaults(llm=llm), False, 2),
    "context": (lambda r, llm: ContextChatEngine.from_defaults(retriever=r, llm=llm), True, 2),
    "condense_question": (
        lambda r, llm: CondenseQuestionChatEngine.from_defaults(RetrieverQueryEngine.from_args(r, llm=llm), llm=llm),
        True,
        3,  # the second turn rewrites its question first
    ),
    "condense_plus_context": (
        lambda r, llm: CondensePlusContextChatEngine.from_defaults(retriever=r, llm=llm),
        True,
        3,
    ),
}


async def _achat(engine: Any, message: str, streaming: bool) -> str:
    if not streaming:
        return str(await engine.achat(message))
    response = await engine.astream_chat(message)
    return "".join([piece async for piece in response.async_response_gen()])


async def _two_turns(engine: Any, retriever: ListRetriever, streaming: bool) -> list[str]:
    first = await _achat(engine, QUESTION, streaming)
    retriever.nodes.reverse()
    return [first, await _achat(engine, "And who lives there?", streaming)]


def _chat(engine: Any, message: str, streaming: bool) -> str:
    return "".join(engine.stream_chat(message).response_gen) if streaming else str(engine.chat(message))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", list(ENGINES))
def test_two_turns(
    name: str, is_async: bool, streaming: bool, llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]
) -> None:
    check_two_turns(name, is_async, streaming, llm, counter, reports)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("name", list(ENGINES))
def test_two_turns_with_smollm2(
    name: str, smol_llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]
) -> None:
    check_two_turns(name, False, True, smol_llm, counter, reports)


def check_two_turns(
    name: str, is_async: bool, streaming: bool, llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]
) -> None:
    make, has_nodes, calls = ENGINES[name]
    retriever = ListRetriever(make_nodes())
    engine = make(retriever, llm)
    if is_async:
        answers = asyncio.run(_two_turns(engine, retriever, streaming))
    else:
        answers = [_chat(engine, QUESTION, streaming)]
        retriever.nodes.reverse()
        answers.append(_chat(engine, "And who lives there?", streaming))
    assert all(answers)
    assert len(reports) == calls
    if has_nodes:
        assert reports[0].misses == 4
        assert (reports[-1].hits, reports[-1].misses) == (4, 0)
        assert reports[-1].forwarded_tokens < reports[-1].prompt_tokens
    else:
        assert reports[1].prefix_tokens > reports[0].prompt_tokens // 2, "the first turn is not prefilled again"
    assert counter.prompt_llm_token_count == sum(r.prompt_tokens for r in reports)
    assert counter.completion_llm_token_count == sum(r.new_tokens for r in reports)
