"""How tokens are chosen: greedy, sampling as transformers samples, ends, limits, stop strings, whole characters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.engine.text import Detokenizer
from tests.engine.helpers import DOCS, Script, chat, hf_greedy, make_engine, plain_ids, segmented
from tests.tiny import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

EMOJI = "Grüße 👩‍👩‍👧‍👦 日本語 🙂🙃 naïve"


def say(engine: KVBoost, text: str | list[int], **options: Any) -> Any:
    """The engine's answer where the model says ``text``, whatever it thinks, and then ends."""
    ids = plain_ids(engine.tokens.tokenizer, text) if isinstance(text, str) else text
    ids = [*ids, engine.tokens.tokenizer.eos_token_id]
    options = {"max_new_tokens": len(ids) + 5, **options}
    return engine.generate(chat(DOCS[:1]), logits_processors=[Script(ids)], **options)


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_sampling_is_that_of_transformers(options: dict[str, Any]) -> None:
    """Same seed, same stream of random numbers: the very same tokens."""
    engine = make_engine(reuse="off")
    got = engine.generate(chat(), seed=11, max_new_tokens=15, **options).token_ids
    ids = torch.tensor([list(segmented(engine, chat()).token_ids)])
    torch.manual_seed(11)
    out = tiny_model().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=15, **{"top_k": 0, **options}
    )
    assert got == out[0, ids.shape[1] :].tolist()


def test_repetition_penalty_is_that_of_transformers() -> None:
    engine = make_engine(reuse="off")
    got = engine.generate(chat(), repetition_penalty=1.5, max_new_tokens=15).token_ids
    ids = torch.tensor([list(segmented(engine, chat()).token_ids)])
    out = tiny_model().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=15, repetition_penalty=1.5
    )
    assert got == out[0, ids.shape[1] :].tolist()
    assert got != engine.generate(chat(), max_new_tokens=15).token_ids


def test_a_seed_reproduces_and_none_does_not() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    options: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 16}
    first, second, other = (engine.generate(chat(), seed=s, **options).token_ids for s in (3, 3, 4))
    assert first == second != other
    free = [engine.generate(chat(), **options).token_ids for _ in range(3)]
    assert len({tuple(f) for f in free}) > 1


def test_sampling_leaves_the_global_generator_alone() -> None:
    engine = make_engine()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine.generate("hello", temperature=1.0, seed=1, max_new_tokens=4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "seed": 5}])
def test_temperature_zero_is_greedy(options: dict[str, Any]) -> None:
    """0.9.0 divided the logits by it."""
    engine = make_engine(reuse="off")
    ids = segmented(engine, chat()).token_ids
    assert engine.generate(chat(), max_new_tokens=10, **options).token_ids == hf_greedy(tiny_model(), ids, 10)


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324])
def test_next_to_no_temperature_is_greedy_too(temperature: float) -> None:
    engine = make_engine()
    greedy = engine.generate(chat(), max_new_tokens=5).token_ids
    assert engine.generate(chat(), max_new_tokens=5, temperature=temperature, seed=1).token_ids == greedy


# -- ends and limits -------------------------------------------------------------------------------------------------


def test_every_end_of_sequence_id_ends() -> None:
    engine = make_engine()
    tokenizer = engine.tokens.tokenizer
    for name in ("</s>", "<|im_end|>"):
        end = tokenizer.convert_tokens_to_ids(name)
        result = engine.generate(
            chat(), logits_processors=[Script([40, 41, end, 42, 43])], max_new_tokens=5, reuse="off"
        )
        assert result.token_ids == [40, 41, end]
        assert result.finish_reason == "stop"
        assert name not in result.text


@pytest.mark.parametrize("n", [1, 2, 9])
def test_max_new_tokens_is_exact(n: int) -> None:
    engine = make_engine()
    engine.engine.eos_ids = frozenset()
    result = engine.generate(chat(), max_new_tokens=n)
    assert len(result.token_ids) == result.report.new_tokens == n
    assert result.finish_reason == "length"


# -- stop strings ----------------------------------------------------------------------------------------------------

SAID = "The river city is old. STOP here"


@pytest.mark.parametrize("stop", ["STOP", " STOP", "old. S", "d. STO", "y is o", ". ", "Th", "e"])
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_part(stop: str) -> None:
    result = say(make_engine(), SAID, stop=stop)
    assert result.text == SAID[: SAID.index(stop)]
    assert result.finish_reason == "stop"


def test_the_first_of_several_stop_strings_counts() -> None:
    assert say(make_engine(), SAID, stop=["STOP", "is old", "city is old. STOP"]).text == "The river city "
    assert say(make_engine(), SAID, stop=["nowhere", "STOPPED"]).text == SAID
    assert say(make_engine(), SAID, stop=[]).text == SAID


def test_nothing_of_a_stop_string_is_ever_streamed() -> None:
    engine = make_engine()
    ids = [*plain_ids(engine.tokens.tokenizer, "abc ST abc STO STOP more"), 2]
    pieces = [
        p.text
        for p in engine.stream("x", logits_processors=[Script(ids)], stop="STOP", max_new_tokens=len(ids))
    ]  # fmt: skip
    assert "".join(pieces) == "abc ST abc STO "
    assert len([p for p in pieces if p]) > 3


def test_generation_stops_computing_at_a_stop_string() -> None:
    result = say(make_engine(), SAID, stop="city")
    assert result.report.new_tokens < len(plain_ids(tiny_tokenizer(), SAID))


# -- characters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_like_tokenizer])
def test_characters_are_never_split(make: Any) -> None:
    engine = make_engine(tokenizer=make())
    ids = plain_ids(engine.tokens.tokenizer, EMOJI)
    assert len(ids) > len(EMOJI), "one character takes several tokens here"
    pieces = [
        p.text
        for p in engine.stream(chat(DOCS[:1]), logits_processors=[Script(ids)], max_new_tokens=len(ids))
    ]  # fmt: skip
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in p for p in pieces)
    assert sum(bool(p) for p in pieces) > 10


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_answer_that_ends_inside_a_character_says_so(cut: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = plain_ids(tokenizer, "a🙂é日")[:cut]
    detok = Detokenizer(tokenizer)
    text = "".join([*(detok.push(i) for i in ids), detok.finish()])
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_like_tokenizer])
def test_pieces_add_up_to_what_decoding_at_once_gives(make: Any) -> None:
    tokenizer = make()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        text = "".join(chr(int(c)) for c in torch.randint(0x20, 0x2FF, (30,), generator=generator)) + " 🙂 the end"
        ids = plain_ids(tokenizer, text)
        detok = Detokenizer(tokenizer)
        assert "".join([*(detok.push(i) for i in ids), detok.finish()]) == tokenizer.decode(ids)


def test_bytes_that_are_no_text_at_all() -> None:
    tokenizer = tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        ids = torch.randint(4, 300, (25,), generator=generator).tolist()
        detok = Detokenizer(tokenizer)
        text = "".join([*(detok.push(i) for i in ids), detok.finish()])
        once = tokenizer.decode(ids, skip_special_tokens=True)
        assert text.replace("\ufffd", "") == once.replace("\ufffd", "")


def test_special_tokens_are_no_text() -> None:
    engine = make_engine()
    think = engine.tokens.tokenizer.convert_tokens_to_ids("<|im_start|>")
    a = plain_ids(engine.tokens.tokenizer, "a")
    assert say(engine, [*a, think, *a]).text == "aa"
