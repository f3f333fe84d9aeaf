"""Streaming and not, sync and async, one and many give the same; cancelling stops the computation; the loop stays free.

No sleeping and no clock: where two threads must meet, an event says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch

from kvboost_rag import CancelToken, KVBoost, errors
from tests.engine.helpers import DOCS, POLICIES, chat, make_engine, spy

PROMPTS: list[Any] = [chat(), chat(DOCS[1:3]), "A plain text. " + DOCS[0], [40, 41, 42, 43], chat([DOCS[3]])]
N = 6


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with make_engine(prefix_bytes=0) as e:  # nothing held: each run computes on its own
        e.warm(DOCS)
        e.engine.eos_ids = frozenset()
        yield e


class Gate:
    """A logits processor that stops the model at its ``at``-th token until somebody opens it."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self.open.wait(60)
        return scores


async def reached(gate: Gate) -> None:
    while not gate.reached.is_set():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}, {"reuse": "off"}, {"repair": "fast"}], ids=str
)
def test_one_text_by_every_road(engine: KVBoost, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": N, **options}
    expected = [engine.generate(p, **options) for p in PROMPTS]
    streamed = [list(engine.stream(p, **options)) for p in PROMPTS]
    batch = engine.generate_batch(PROMPTS, **options)

    async def all_at_once() -> tuple[list[Any], list[str]]:
        results = await asyncio.gather(*(engine.agenerate(p, **options) for p in PROMPTS))
        texts = ["".join([piece.text async for piece in engine.astream(p, **options)]) for p in PROMPTS]
        return results, texts

    results, texts = asyncio.run(all_at_once())
    for want, pieces, many, later, text in zip(expected, streamed, batch, results, texts, strict=True):
        assert pieces[-1].result.token_ids == want.token_ids
        assert "".join(p.text for p in pieces) == want.text == text
        assert many.token_ids == later.token_ids == want.token_ids
        assert many.report.forwarded_tokens == later.report.forwarded_tokens == want.report.forwarded_tokens


def test_streaming_really_streams(engine: KVBoost) -> None:
    with spy(engine) as rows:
        stream = engine.stream(PROMPTS[0], max_new_tokens=50)
        next(stream)
        seen = len(rows.calls)
        assert seen < 20, "the first piece comes before the last token is computed"
        stream.close()
    assert len(rows.calls) == seen, "closing stops"


def test_interleaved_streams_do_not_disturb_each_other(engine: KVBoost) -> None:
    expected = [engine.generate(p, max_new_tokens=N).text for p in PROMPTS]
    streams = [engine.stream(p, max_new_tokens=N) for p in PROMPTS]
    texts = [""] * len(PROMPTS)
    for pieces in zip_longest(*streams):
        for i, piece in enumerate(pieces):
            texts[i] += piece.text if piece else ""
    assert texts == expected


def test_threads_do_not_disturb_each_other(engine: KVBoost) -> None:
    expected = [engine.generate(p, max_new_tokens=N).token_ids for p in PROMPTS]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = engine.generate(PROMPTS[i], max_new_tokens=N).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(len(PROMPTS))] == expected


def test_a_batch_is_checked_before_its_first_prompt_runs(engine: KVBoost) -> None:
    with spy(engine) as rows, pytest.raises(errors.UsageError):
        engine.generate_batch([PROMPTS[0], ""], max_new_tokens=3)
    assert rows.calls == []
    assert engine.generate_batch([], max_new_tokens=3) == []


# -- cancelling ------------------------------------------------------------------------------------------------------


def test_cancel_from_another_thread(engine: KVBoost) -> None:
    cancel, gate = CancelToken(), Gate(at=4)

    def other() -> None:
        assert gate.reached.wait(60)
        cancel.cancel()
        gate.open.set()

    thread = threading.Thread(target=other)
    thread.start()
    result = engine.generate(chat(), max_new_tokens=200, cancel=cancel, logits_processors=[gate])
    thread.join()
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == 4
    full = engine.generate(chat(), max_new_tokens=4)
    assert result.token_ids == full.token_ids, "what was said stays said"


def test_nothing_is_computed_after_a_cancel(engine: KVBoost) -> None:
    """The blocks of missed chunks are computed after the answer: nobody waits for that any more."""
    cancel = CancelToken()
    unknown = "A document that nobody knows yet, not even the store."
    blocks = len(list(engine.store.keys()))
    with spy(engine) as rows:
        for piece in engine.stream(chat([unknown]), chunks=[unknown], max_new_tokens=50, cancel=cancel):
            result = piece.result
            if not cancel.cancelled:
                cancel.cancel()
                seen = len(rows.calls)
    assert len(rows.calls) == seen
    assert result is not None
    assert (result.finish_reason, result.report.stored_tokens) == ("cancelled", 0)
    assert len(list(engine.store.keys())) == blocks


def test_cancelled_before_it_started(engine: KVBoost) -> None:
    cancel = CancelToken()
    cancel.cancel()
    with spy(engine) as rows:
        result = engine.generate(chat(), cancel=cancel)
        later = asyncio.run(engine.agenerate(chat(), cancel=cancel))
    assert rows.calls == []
    for r in (result, later):
        assert (r.finish_reason, r.token_ids, r.text) == ("cancelled", [], "")


def test_one_token_may_serve_several_requests(engine: KVBoost) -> None:
    """A request that ends does not cancel the others that share its token."""
    cancel = CancelToken()

    async def twice() -> list[str]:
        first = await engine.agenerate(chat(), max_new_tokens=3, cancel=cancel)
        async for _ in engine.astream(chat(), max_new_tokens=9, cancel=cancel):
            break
        second = await engine.agenerate(chat(), max_new_tokens=3, cancel=cancel)
        return [first.finish_reason, second.finish_reason]

    assert asyncio.run(twice()) == ["length", "length"]
    assert not cancel.cancelled


# -- async -----------------------------------------------------------------------------------------------------------


def test_the_loop_ticks_while_a_token_is_computed(engine: KVBoost) -> None:
    gate = Gate(at=3)

    async def main() -> int:
        task = asyncio.create_task(engine.agenerate(chat(), max_new_tokens=6, logits_processors=[gate]))
        await reached(gate)
        ticks = 0
        for _ in range(100):  # the model is in the middle of a token all the while
            await asyncio.sleep(0)
            ticks += 1
        assert not task.done()
        gate.open.set()
        assert (await task).finish_reason == "length"
        return ticks

    assert asyncio.run(main()) == 100


def test_a_cancelled_task_stops_computing(engine: KVBoost) -> None:
    gate = Gate(at=3)

    async def main() -> None:
        task = asyncio.create_task(engine.agenerate(chat(), max_new_tokens=500, logits_processors=[gate]))
        await reached(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        after = await engine.agenerate(chat(), max_new_tokens=2)  # waits until the worker is free
        assert len(after.token_ids) == 2

    with spy(engine) as rows:
        asyncio.run(main())
    assert gate.calls == 3
    assert sum(n == 1 for n in rows.calls) <= 4, "two tokens of the first, one of the second request"


def test_a_task_cancelled_in_the_queue_never_starts(engine: KVBoost) -> None:
    gate = Gate(at=2)
    never = Gate(at=10_000)

    async def main() -> None:
        running = asyncio.create_task(engine.agenerate(chat(), max_new_tokens=4, logits_processors=[gate]))
        await reached(gate)
        waiting = asyncio.create_task(engine.agenerate(chat(), max_new_tokens=4, logits_processors=[never]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open.set()
        assert len((await running).token_ids) == 4

    asyncio.run(main())
    assert never.calls == 0


def test_leaving_an_async_stream_early_stops(engine: KVBoost) -> None:
    async def main() -> None:
        stream = engine.astream(chat(), max_new_tokens=500)
        async for _ in stream:
            break
        await stream.aclose()
        await engine.agenerate(chat(), max_new_tokens=1)

    with spy(engine) as rows:
        asyncio.run(main())
    assert len(rows.calls) < 400


def test_errors_reach_the_awaiting_caller(engine: KVBoost) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("from the worker")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="from the worker"):
            await engine.agenerate(chat(), logits_processors=[broken])
        with pytest.raises(errors.EmptyPromptError):
            await engine.agenerate("")
        with pytest.raises(errors.ContextLengthError):
            await engine.agenerate("x", max_new_tokens=5000)
        assert (await engine.agenerate("x", max_new_tokens=2)).finish_reason == "length", "and the next one runs"

    asyncio.run(main())


def test_a_second_event_loop_can_use_the_same_engine(engine: KVBoost) -> None:
    one, two = (asyncio.run(engine.agenerate(chat(), max_new_tokens=4)).token_ids for _ in range(2))
    assert one == two


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_streams_what_it_generates(engine: KVBoost, policy: str) -> None:
    options: dict[str, Any] = {"repair": POLICIES[policy], "max_new_tokens": 6}
    pieces = list(engine.stream(chat(), **options))
    assert pieces[-1].result is not None
    assert pieces[-1].result.token_ids == engine.generate(chat(), **options).token_ids
