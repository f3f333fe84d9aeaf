"""The event loop keeps ticking, and a request that nobody waits for stops computing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.kvboost_rag import KVBoostLLM

LONG = [ChatMessage(content="Tell me about the city and the river.")]
MANY = 400  # tokens: seconds, on any machine, if nobody stops it


def endless(llm: KVBoostLLM) -> dict[str, Any]:
    """Options under which the model never ends by itself."""
    ends = sorted(llm.engine.engine.eos_ids)

    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(-1, torch.tensor(ends), float("-inf"))

    return {"max_tokens": MANY, "logits_processors": [forbid]}


async def _ticks(work: Any) -> int:
    """How often the loop came round while ``work`` ran."""
    ticks = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    await task
    return ticks


async def _drain(llm: KVBoostLLM) -> int:
    return len([r async for r in await llm.astream_chat(LONG, max_tokens=30)])


WORK: dict[str, Callable[[KVBoostLLM], Any]] = {
    "achat": lambda llm: llm.achat(LONG, max_tokens=30),
    "acomplete": lambda llm: llm.acomplete("The city and the river", max_tokens=30),
    "astream_chat": _drain,
}


@pytest.mark.parametrize("name", list(WORK))
def test_the_loop_ticks_during_a_call(name: str, make_llm: Any) -> None:
    llm = make_llm(seed=1)
    assert asyncio.run(_ticks(WORK[name](llm))) >= 5


def test_a_cancelled_achat_stops_computing(make_llm: Any, reports: list[Any]) -> None:
    llm = make_llm()
    adapter = llm.engine.adapter

    async def scenario() -> None:
        begun = adapter.rows_forwarded
        task = asyncio.ensure_future(llm.achat(LONG, **endless(llm)))
        while adapter.rows_forwarded == begun and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next request waits for the thread, so after it nothing of the first one is left.
        await llm.achat(LONG, max_tokens=1)

    asyncio.run(scenario())
    assert sum(r.new_tokens for r in reports) < MANY


@pytest.mark.parametrize("explicit", [True, False])
def test_a_stream_that_is_left_stops_computing(explicit: bool, make_llm: Any) -> None:
    llm = make_llm()
    adapter = llm.engine.adapter
    begun = adapter.rows_forwarded

    async def scenario() -> None:
        stream = await llm.astream_chat(LONG, **endless(llm))
        async for _ in stream:
            break
        if explicit:
            await stream.aclose()
        del stream
        gc.collect()
        await asyncio.sleep(0)
        await llm.achat(LONG, max_tokens=1)

    asyncio.run(scenario())
    assert adapter.rows_forwarded - begun < MANY / 2


def test_a_sync_stream_that_is_left_stops_computing(make_llm: Any) -> None:
    llm = make_llm()
    begun = llm.engine.adapter.rows_forwarded
    stream = llm.stream_chat(LONG, **endless(llm))
    next(stream)
    stream.close()
    assert llm.engine.adapter.rows_forwarded - begun < MANY / 2


def test_many_at_once_give_what_each_gives_alone(make_llm: Any) -> None:
    llm = make_llm()
    prompts = [f"Question {i}: what is the name of the river?" for i in range(6)]
    alone = [llm.complete(p).text for p in prompts]

    async def together() -> list[str]:
        return [r.text for r in await asyncio.gather(*(llm.acomplete(p) for p in prompts))]

    assert asyncio.run(together()) == alone
