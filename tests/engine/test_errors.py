"""Wrong calls are told what was wrong and what to do; what is not proved is refused, and works the plain way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from kvboost_rag import KVBoost, Repair, errors
from tests.engine.helpers import DOCS, TOLERANCE, chat, full_prefill_gap, hf_greedy, make_engine, segmented
from tests.tiny import tiny_model, tiny_tokenizer

MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    return make_engine()


@pytest.mark.parametrize("prompt", ["", [], ()], ids=repr)
def test_nothing_to_answer(engine: KVBoost, prompt: Any) -> None:
    with pytest.raises(errors.EmptyPromptError):
        engine.generate(prompt)
    with pytest.raises(errors.EmptyPromptError):
        engine.score(prompt, "x")


def test_nothing_to_score(engine: KVBoost) -> None:
    for continuation in ("", []):
        with pytest.raises(errors.EmptyPromptError):
            engine.score("x", continuation)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("chunk", "chunks"), ("stops", "stop")],
)
def test_an_unknown_option_names_the_nearest(engine: KVBoost, given: str, nearest: str) -> None:
    with pytest.raises(errors.UnknownOptionError, match=f"{given}.*did you mean '{nearest}'"):
        engine.generate("x", **{given: 1})


@pytest.mark.parametrize(
    ("option", "given", "nearest"),
    [("repair", "balance", "balanced"), ("reuse", "chunk", "chunks"), ("repair", "Fast", "fast")],
)
def test_an_unknown_value_names_the_nearest(engine: KVBoost, option: str, given: str, nearest: str) -> None:
    with pytest.raises(errors.UnknownOptionError, match=f"did you mean '{nearest}'"):
        engine.generate("x", **{option: given})
    with pytest.raises(errors.UnknownOptionError, match=f"did you mean '{nearest}'"):
        make_engine(**{option: given})


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, b"bytes", MESSAGE, {1, 2}, [1.5], [None], [1, MESSAGE], [True], ["text"], torch.tensor([1, 2]),
     [{"content": "no role"}], [{"role": "boss", "content": "x"}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": [{"type": "image", "image": "x"}]}]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt(engine: KVBoost, prompt: Any) -> None:
    with pytest.raises(errors.UsageError):
        engine.generate(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": 1.5}, {"max_new_tokens": "5"},
        {"max_new_tokens": True}, {"temperature": -0.1}, {"temperature": "hot"}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"temperature": True}, {"top_p": 0}, {"top_p": 1.1}, {"top_p": float("nan")},
        {"top_k": -1}, {"top_k": 1.5}, {"repetition_penalty": 0}, {"repetition_penalty": float("nan")},
        {"seed": 1.5}, {"seed": "x"}, {"seed": 1 << 64}, {"stop": 5}, {"stop": ["a", 5]}, {"chunks": 5}, {"chunks": [None]},
        {"repair": 0.15}, {"repair": ["balanced"]}, {"reuse": ["chunks"]}, {"cancel": True}, {"tools": 5},
        {"tools": "search"}, {"logits_processors": 5}, {"template_kwargs": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values(engine: KVBoost, options: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError) as caught:
        engine.generate("x", **options)
    assert (
        next(iter(options)) in str(caught.value) or "repair policy" in str(caught.value) or "reuse" in str(caught.value)
    )


@pytest.mark.parametrize(
    "values",
    [{"first": -1}, {"first": 1.5}, {"query": 1.1}, {"query": "x"}, {"cap": -0.1}, {"blend": True}, {"last": True}],
    ids=str,
)
def test_wrong_repairs(values: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match=next(iter(values))):
        Repair(**values)


def test_options_that_are_none_mean_the_default(engine: KVBoost) -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "stop", "seed", "chunks", "tools", "cancel", "repair"))
    assert (
        engine.generate("x", max_new_tokens=3, **nothing).token_ids == engine.generate("x", max_new_tokens=3).token_ids
    )


def test_ids_may_be_numpys(engine: KVBoost) -> None:
    given = engine.generate(list(np.array([5, 6])), max_new_tokens=2)
    assert given.token_ids == engine.generate([5, 6], max_new_tokens=2).token_ids


@pytest.mark.parametrize("ids", [[-1], [5, 10**6], [1, 2, 523]])
def test_ids_out_of_range(engine: KVBoost, ids: list[int]) -> None:
    with pytest.raises(errors.UsageError, match="from 0 to 522"):
        engine.generate(ids)


def test_continuation_ids_out_of_range(engine: KVBoost) -> None:
    with pytest.raises(errors.UsageError, match="from 0 to 522"):
        engine.score("x", [5, 10**6])


@pytest.mark.parametrize("reuse", ["chunks", "prefix", "off"])
def test_beyond_the_window_names_both_numbers(reuse: str) -> None:
    engine = make_engine(reuse=reuse)
    ids = [40] * 4090
    with pytest.raises(errors.ContextLengthError, match=r"4090.*7.*4096.*at most 6"):
        engine.generate(ids, max_new_tokens=7)
    assert len(engine.generate(ids, max_new_tokens=2).token_ids) >= 1
    with pytest.raises(errors.ContextLengthError):
        engine.generate([40] * 5000, max_new_tokens=1)


def test_to_the_last_position_of_the_window() -> None:
    engine = make_engine(reuse="chunks")
    engine.engine.eos_ids = frozenset()
    assert len(engine.generate([40] * 4090, max_new_tokens=6).token_ids) == 6


def test_a_chat_without_a_template() -> None:
    engine = make_engine(tokenizer=tiny_tokenizer(chat_template=None))
    with pytest.raises(errors.TokenizerError, match="chat_template"):
        engine.generate([MESSAGE])
    assert engine.generate("a plain string works", max_new_tokens=2).token_ids


def test_a_template_that_refuses_says_so_in_its_own_words() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ raise_exception('no system role here') }}")
    with pytest.raises(errors.TokenizerError, match="no system role here"):
        make_engine(tokenizer=tokenizer).generate([MESSAGE])


def test_a_negative_filler_is_no_filler() -> None:
    with pytest.raises(errors.UsageError, match="filler_tokens"):
        make_engine(filler_tokens=-5)


def test_a_batch_is_several_prompts(engine: KVBoost) -> None:
    with pytest.raises(errors.UsageError, match="one string"):
        engine.generate_batch("not nine prompts")


def test_a_closed_engine_says_so_to_async_callers() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(errors.UsageError, match="closed"):
        asyncio.run(engine.agenerate("x"))


def test_warm_wants_several_texts(engine: KVBoost) -> None:
    with pytest.raises(errors.UsageError, match=r"pass \[text\]"):
        engine.warm("one text")
    with pytest.raises(errors.UsageError, match="head"):
        engine.warm(["text " * 20], head="")
    with pytest.raises(errors.UsageError, match="filler"):
        make_engine(filler="  ")


# -- models that reuse is not proved for -----------------------------------------------------------------------------

REASONS = {
    "gemma2": "gemma2", "gemma3": "gemma3", "dynamic": "dynamic", "deepseek_v3": "MLA", "falcon": "ALiBi",
    "bloom": "ALiBi", "mamba": "linear_attention", "t5": "encoder-decoder",
}  # fmt: skip
PLAIN = [f for f in REASONS if f != "t5"]


@pytest.mark.parametrize(("family", "reason"), REASONS.items())
@pytest.mark.parametrize("reuse", ["chunks", "prefix"])
def test_what_is_not_proved_is_refused_with_a_reason_and_a_way_out(family: str, reason: str, reuse: str) -> None:
    with pytest.raises(errors.UnsupportedModelError, match=reason) as caught:
        make_engine(model=tiny_model(family), reuse=reuse)
    assert ('reuse="off"' in str(caught.value)) == (family != "t5")


@pytest.mark.parametrize("family", PLAIN)
def test_refused_models_work_the_plain_way(family: str) -> None:
    engine = make_engine(model=tiny_model(family), reuse="off")
    ids = segmented(engine, chat()).token_ids
    result = engine.generate(chat(), max_new_tokens=10)
    assert result.token_ids == hf_greedy(tiny_model(family), ids, 10)
    assert result.report.forwarded_tokens == len(ids)
    assert len(engine.score(chat(), [40, 41, 42]).logprobs) == 3


@pytest.mark.parametrize("family", PLAIN)
def test_refused_models_refuse_reuse_by_the_call_too(family: str) -> None:
    engine = make_engine(model=tiny_model(family), reuse="off")
    for reuse in ("chunks", "prefix"):
        with pytest.raises(errors.UnsupportedModelError):
            engine.generate(chat(), reuse=reuse)
    with pytest.raises(errors.UnsupportedModelError):
        engine.warm(DOCS)
    with pytest.raises(errors.UnsupportedModelError):
        engine.plan_warm(DOCS)


def test_a_plain_score_is_that_of_the_model() -> None:
    engine = make_engine(model=tiny_model("gemma3"), reuse="off")
    ids = list(segmented(engine, chat()).token_ids)
    score = engine.score(chat(), [40, 41, 42], logits=True)
    with torch.no_grad():
        logits = tiny_model("gemma3")(torch.tensor([[*ids, 40, 41]])).logits[0, len(ids) - 1 :]
    assert score.logits is not None
    assert (score.logits - logits).abs().max() < TOLERANCE


# -- models that it is proved for up to a length ---------------------------------------------------------------------

LIMITED = {"mistral-sliding": (64, "sliding"), "longrope": (512, "longrope")}


@pytest.mark.parametrize("family", LIMITED)
def test_inside_its_limit_reuse_works(family: str) -> None:
    engine = make_engine(family)
    text = "The river city is old and it has a name."
    prompt = f"{text} Why?"
    engine.warm([text])
    result = engine.generate(prompt, max_new_tokens=4, repair=Repair.full())
    assert result.report.hits == 1
    assert full_prefill_gap(engine, tiny_model(family), prompt, repair=Repair.full()) < TOLERANCE
    ids = segmented(engine, prompt).token_ids
    assert result.token_ids == hf_greedy(tiny_model(family), ids, 4)


@pytest.mark.parametrize("family", LIMITED)
def test_beyond_its_limit_reuse_is_refused_and_off_is_the_plain_model(family: str) -> None:
    limit, reason = LIMITED[family]
    engine = make_engine(family)
    ids = (list(range(20, 300)) * 2)[: limit + 10]
    with pytest.raises(errors.ContextLengthError, match=f"{limit}.*{reason}"):
        engine.generate(ids, max_new_tokens=4)
    assert engine.generate(ids, max_new_tokens=4, reuse="off").token_ids == hf_greedy(tiny_model(family), ids, 4)
    with pytest.raises(errors.ContextLengthError):
        engine.generate(ids[: limit - 2], max_new_tokens=4)
    across = engine.generate(ids[: limit - 2], max_new_tokens=6, reuse="off")
    assert across.token_ids == hf_greedy(tiny_model(family), ids[: limit - 2], 6)
    within = engine.generate(ids[:30], max_new_tokens=4)  # and afterwards the short ones are still right
    assert within.token_ids == hf_greedy(tiny_model(family), ids[:30], 4)


def test_sliding_window_switched_off_is_no_window() -> None:
    engine = make_engine(model=tiny_model("qwen2", use_sliding_window=False, sliding_window=32))
    assert engine.adapter.max_tokens == 4096
