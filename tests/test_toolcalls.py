"""Reading tool calls out of answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag import CallFilter, parse_native, parse_tool_calls

CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{CALL}</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{CALL}",
        CALL,
        f"[{CALL}]",
        f"```json\n{CALL}\n```",
        CALL.replace("arguments", "parameters"),
        json.dumps({"name": "add", "arguments": '{"a": 1}'}),
    ],
)
def test_known_forms(text: str) -> None:
    parsed = parse_tool_calls(text, ["add"])
    assert [(c.name, c.arguments) for c in parsed.calls] == [("add", {"a": 1})]
    assert (parsed.text, parsed.bad) == ("", ())


def test_several_calls_and_text_around_them() -> None:
    parsed = parse_tool_calls(f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}{CALL}</tool_call>")
    assert len(parsed.calls) == 3
    assert parsed.text == "Let me see."


@pytest.mark.parametrize("text", ["", "Hello", '{"name": "Bob", "age": 3}', "[1, 2]", "{not json", '{"answer": 1}'])
def test_an_answer_is_not_a_call(text: str) -> None:
    parsed = parse_tool_calls(text, ["add"])
    assert (parsed.text, parsed.calls, parsed.bad) == (text, (), ())


@pytest.mark.parametrize(
    "body", ['{"name": "add", "arguments": {"a"', '{"arguments": {}}', '{"name": "add", "arguments": [1]}', ""]
)
def test_a_broken_call_is_told_apart(body: str) -> None:
    parsed = parse_tool_calls(f"<tool_call>{body}</tool_call>", ["add"])
    assert not parsed.calls
    assert len(parsed.bad) == 1
    assert parsed.bad[0].reason


def test_a_forced_call_that_is_cut_off_is_a_bad_one() -> None:
    parsed = parse_tool_calls('{"name": "add", "argu', ["add"], forced=True)
    assert not parsed.calls
    assert "cut off" in parsed.bad[0].reason


def test_no_arguments_are_empty_ones() -> None:
    assert parse_tool_calls('{"name": "now"}', ["now"]).calls[0].arguments == {}
    assert parse_tool_calls('{"name": "now", "arguments": null}', ["now"]).calls[0].arguments == {}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([f"Yes.\n<tool_call>{CALL}</tool_call>", "a < b <tool> c", CALL, "  {x", "plain", "1 <"]), st.data()
)
def test_a_streamed_answer_shows_all_but_the_call(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    held_back = CallFilter()
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += held_back.push(text[start:end])
    rest = held_back.finish()
    assert shown + rest == text
    assert "<tool_call" not in shown
    if text == CALL:
        assert shown == ""
    if text == "plain":
        assert shown == text


def test_the_tokenizers_own_template_reads_first() -> None:
    class Tokenizer:
        response_template: Any = {"any": "thing"}

        def parse_response(self, raw: str, *, prefix: str, tools: Any) -> dict[str, Any]:
            if raw == "broken":
                raise ValueError("does not follow the template")
            assert prefix == "PROMPT"
            return {"content": "So:", "tool_calls": [{"type": "function", "function": json.loads(raw)}]}

    parsed = parse_native(Tokenizer(), CALL, "PROMPT", [])
    assert parsed is not None
    assert parsed.text == "So:"
    assert parsed.calls[0].arguments == {"a": 1}
    assert parse_native(Tokenizer(), "broken", "PROMPT", []) is None
    assert parse_native(object(), CALL, "PROMPT", []) is None
