"""Async calls: the event loop keeps ticking, and a cancelled request stops computing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from langchain_kvboost_rag import ChatKVBoost, KVBoostLLM
from tests.integrations.langchain.scripted import scripted_engine

LONG = "the first answer of the city " * 30


class Gate(LogitsProcessor):
    """Holds the computing thread at a token until the test lets it go on, and counts the tokens."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.tokens = 0
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        if self.tokens == self.at:
            self.reached.set()
            assert self.open.wait(60)
        return scores


async def _reached(gate: Gate) -> None:
    """Waits for the computing thread without blocking the loop; itself a proof that the loop runs."""
    while not gate.reached.is_set():
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
async def test_the_loop_ticks_while_the_model_computes(kind: Any) -> None:
    gate = Gate(at=2)
    task = asyncio.create_task(kind(engine=scripted_engine("hello there")).ainvoke("q", logits_processors=[gate]))
    await _reached(gate)
    for _ in range(1000):  # the model stands in the middle of an answer; the loop does not
        await asyncio.sleep(0)
    assert not task.done()
    gate.open.set()
    answer = await task
    assert getattr(answer, "content", answer) == "hello there"


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
async def test_a_cancelled_request_stops_computing(kind: Any) -> None:
    gate = Gate(at=3)
    engine = scripted_engine(LONG)
    llm = kind(engine=engine, max_tokens=400)
    task = asyncio.create_task(llm.ainvoke("q", logits_processors=[gate]))
    await _reached(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open.set()
    engine.script = lambda prompt, options: "next"
    answer = await llm.ainvoke("q")  # waits for the thread, so the first request is over now
    assert getattr(answer, "content", answer) == "next"
    assert gate.tokens <= 4


async def test_a_stream_that_is_left_stops_computing() -> None:
    gate = Gate(at=10_000)
    engine = scripted_engine(LONG)
    llm = ChatKVBoost(engine=engine, max_tokens=400)
    stream = llm.astream("q", logits_processors=[gate])
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    engine.script = lambda prompt, options: "next"
    assert (await llm.ainvoke("q")).content == "next"
    assert gate.tokens < 100

    gate.tokens = 0
    engine.script = lambda prompt, options: LONG
    for _ in llm.stream("q", logits_processors=[gate]):
        break
    assert gate.tokens < 10


async def test_many_at_once_answer_each_their_own() -> None:
    engine = scripted_engine(lambda prompt, options: f"answer to {prompt[-1]['content']}")
    llm = ChatKVBoost(engine=engine)
    answers = await llm.abatch([f"question {i}" for i in range(6)])
    assert [a.content for a in answers] == [f"answer to question {i}" for i in range(6)]
    assert [a.content for a in llm.batch(["x", "y", "z"])] == ["answer to x", "answer to y", "answer to z"]


def test_a_timeout_ends_a_request() -> None:
    gate = Gate(at=2)
    llm = ChatKVBoost(engine=scripted_engine(LONG), max_tokens=400, timeout=0.01)
    threading.Timer(0.2, gate.open.set).start()
    with pytest.raises(TimeoutError, match="timeout"):
        llm.invoke("q", logits_processors=[gate])
    assert gate.tokens <= 3
    assert llm.invoke("q", timeout=None, max_tokens=3).response_metadata["finish_reason"] == "length"


async def test_async_and_sync_streams_are_the_same() -> None:
    llm = ChatKVBoost(engine=scripted_engine("one and two, three"))
    sync = [c.content for c in llm.stream("q")]
    assert [c.content async for c in llm.astream("q")] == sync
    assert "".join(sync) == llm.invoke("q").content == (await llm.ainvoke("q")).content
    assert len(sync) > 4
