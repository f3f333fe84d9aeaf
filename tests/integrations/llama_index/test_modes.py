"""Every response mode, sync and async, streamed or not: what is reused when the same nodes come in another order."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from llama_index.core.callbacks import TokenCountingHandler
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.llms.kvboost_rag import KVBoostLLM, KVBoostSynthesizer, ReuseWarning, verbatim_context

from tests.integrations.llama_index.corpus import PASSAGES, QUESTION, ListRetriever, make_nodes

# mode → (calls per question, nodes that stand verbatim over all calls)
MODES = {
    "compact": (1, 4),
    "refine": (4, 4),
    "tree_summarize": (1, 4),
    "simple_summarize": (1, 0),
    "accumulate": (4, 4),
    "compact_accumulate": (1, 4),
    "generation": (1, 0),
    "no_text": (0, 0),
    "context_only": (0, 0),
}
NO_STREAM = {"accumulate", "compact_accumulate"}  # LlamaIndex refuses to stream these
WAYS = [(is_async, streaming) for is_async in (False, True) for streaming in (False, True)]


async def _aask(engine: RetrieverQueryEngine, streaming: bool) -> str:
    response: Any = await engine.aquery(QUESTION)
    if not streaming or not hasattr(response, "async_response_gen"):
        return str(response)
    return "".join([piece async for piece in response.async_response_gen()])


def ask(engine: RetrieverQueryEngine, is_async: bool, streaming: bool) -> str:
    if is_async:
        return asyncio.run(_aask(engine, streaming))
    response: Any = engine.query(QUESTION)
    if streaming and hasattr(response, "response_gen"):
        return "".join(response.response_gen)
    return str(response)


def both_orders(engine_args: dict[str, Any], is_async: bool, streaming: bool) -> list[str]:
    """Answers to the same question with the nodes in order, and reversed."""
    nodes = make_nodes()
    out = []
    for order in (nodes, nodes[::-1]):
        engine = RetrieverQueryEngine.from_args(ListRetriever(order), streaming=streaming, **engine_args)
        out.append(ask(engine, is_async, streaming))
    return out


def test_every_mode_is_in_the_matrix() -> None:
    assert {m.value for m in ResponseMode} == set(MODES)


@pytest.mark.parametrize(("is_async", "streaming"), WAYS)
@pytest.mark.parametrize("mode", list(MODES))
def test_mode(
    mode: str, is_async: bool, streaming: bool, llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]
) -> None:
    check_mode(mode, is_async, streaming, llm, counter, reports)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("mode", list(MODES))
def test_mode_with_smollm2(mode: str, smol_llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]) -> None:
    check_mode(mode, False, False, smol_llm, counter, reports)


def check_mode(
    mode: str, is_async: bool, streaming: bool, llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any]
) -> None:
    calls, verbatim = MODES[mode]
    args = {"response_mode": mode, "llm": llm}
    if streaming and mode in NO_STREAM:
        with pytest.raises(ValueError, match="stream"):
            both_orders(args, is_async, streaming)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReuseWarning)
        answers = both_orders(args, is_async, streaming)
    assert all(answers) or mode in ("no_text", "context_only")
    first, second = reports[:calls], reports[calls:]
    assert len(first) == len(second) == calls
    assert sum(r.misses for r in first) == sum(r.hits for r in second) == verbatim
    assert sum(r.misses for r in second) == 0
    if verbatim:
        forwarded = [sum(r.forwarded_tokens for r in asked) for asked in (first, second)]
        assert forwarded[1] < forwarded[0] * 0.85
    assert counter.prompt_llm_token_count == sum(r.prompt_tokens for r in reports)
    assert counter.completion_llm_token_count == sum(r.new_tokens for r in reports)
    assert len(counter.llm_token_counts) == len(reports)


@pytest.mark.parametrize(("is_async", "streaming"), WAYS)
def test_simple_summarize_is_verbatim_with_the_fixed_template(
    is_async: bool, streaming: bool, llm: KVBoostLLM, reports: list[Any], recwarn: pytest.WarningsRecorder
) -> None:
    both_orders(
        {"response_mode": "simple_summarize", "llm": llm, "text_qa_template": verbatim_context()}, is_async, streaming
    )
    assert [(r.misses, r.hits) for r in reports] == [(4, 0), (0, 4)]
    assert not [w for w in recwarn if w.category is ReuseWarning]


@pytest.mark.parametrize(("is_async", "streaming"), WAYS)
def test_own_synthesizer(is_async: bool, streaming: bool, llm: KVBoostLLM, reports: list[Any]) -> None:
    synthesizer = KVBoostSynthesizer(llm=llm, streaming=streaming)
    both_orders({"response_synthesizer": synthesizer}, is_async, streaming)
    assert [(r.misses, r.hits) for r in reports] == [(4, 0), (0, 4)]


@pytest.mark.parametrize("is_async", [False, True])
def test_own_synthesizer_cuts_no_node_when_the_window_is_small(
    is_async: bool, llm: KVBoostLLM, reports: list[Any], recwarn: pytest.WarningsRecorder
) -> None:
    synthesizer = KVBoostSynthesizer(llm=llm)
    half = llm.count_tokens("\n\n".join(PASSAGES)) // 2 + 100
    llm.context_window = synthesizer_frame(synthesizer, llm) + half + llm.max_tokens
    both_orders({"response_synthesizer": synthesizer}, is_async, False)
    assert len(reports) == 4, "two calls per question: a first answer and a refined one"
    assert sum(r.misses for r in reports[:2]) == sum(r.hits for r in reports[2:]) == len(PASSAGES)
    assert not [w for w in recwarn if w.category is ReuseWarning]
    assert all(r.prompt_tokens + llm.max_tokens <= llm.context_window for r in reports)


def synthesizer_frame(synthesizer: KVBoostSynthesizer, llm: KVBoostLLM) -> int:
    """Tokens of the larger of the two templates, question included, and of an answer to refine."""
    prompts = synthesizer.get_prompts()
    values = {"context_str": "", "context_msg": "", "existing_answer": "", "query_str": QUESTION}
    first = prompts["text_qa_template"].format_messages(llm=llm, **values)
    refine = prompts["refine_template"].format_messages(llm=llm, **values)
    return max(llm.count_tokens(first), llm.count_tokens(refine) + llm.max_tokens)


def test_nodes_given_directly_are_learned_too(make_llm: Any, reports: list[Any]) -> None:
    from llama_index.core.schema import NodeWithScore

    synthesizer = KVBoostSynthesizer(llm=make_llm(watch=False))
    for nodes in (make_nodes(), make_nodes()[::-1]):
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=n) for n in nodes])
    assert [(r.misses, r.hits) for r in reports] == [(4, 0), (0, 4)]


def check_multimodal(llm: KVBoostLLM, reports: list[Any]) -> None:
    """``multimodal=True`` puts nodes into content blocks that LlamaIndex joins: the bodies stand verbatim all the same."""
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode.COMPACT, multimodal=True)
    both_orders({"response_synthesizer": synthesizer}, False, False)
    first, second = reports
    assert first.misses == second.hits == 4
    assert second.misses == 0


def test_multimodal(llm: KVBoostLLM, reports: list[Any]) -> None:
    check_multimodal(llm, reports)


@pytest.mark.slow
@pytest.mark.real_model
def test_multimodal_with_smollm2(smol_llm: KVBoostLLM, reports: list[Any]) -> None:
    check_multimodal(smol_llm, reports)
