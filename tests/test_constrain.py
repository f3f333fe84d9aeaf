"""Constrained decoding: whatever the model wants to say, the answer follows the schema."""

from __future__ import annotations

import builtins
import json
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, close_objects, json_schema_processor, tool_call_schema
from kvboost_rag.errors import MissingExtraError, UnknownOptionError, UsageError
from tests.tiny import tiny_model, tiny_tokenizer

COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    return KVBoost(tiny_model("llama"), tiny_tokenizer(), store="memory", filler_tokens=32, name="tiny")


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_random_model_answers_within_the_schema(engine: KVBoost, temperature: float) -> None:
    for seed in range(3):
        hooks = [engine.json_processor(COLOURS)]
        result = engine.generate("Say: ", temperature=temperature, seed=seed, logits_processors=hooks)
        answer = json.loads(result.text)
        assert answer["colour"] in ("red", "green")
        assert 1 <= answer["count"] <= 9
        assert result.finish_reason == "stop"


def test_without_the_processor_it_does_not(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match="."):
        json.loads(engine.generate("Say: ", max_new_tokens=20).text)


def test_streaming_gives_the_same_text(engine: KVBoost) -> None:
    whole = engine.generate("Say: ", logits_processors=[engine.json_processor(COLOURS)]).text
    pieces = engine.stream("Say: ", logits_processors=[engine.json_processor(COLOURS)])
    assert "".join(p.text for p in pieces) == whole


def test_a_processor_serves_one_request(engine: KVBoost) -> None:
    hook = engine.json_processor(COLOURS)
    engine.generate("Say: ", logits_processors=[hook])
    with pytest.raises(UsageError, match="one request"):
        engine.generate("Say it again: ", logits_processors=[hook])


def test_ids_beyond_the_tokenizer_are_masked() -> None:
    tokenizer = tiny_tokenizer()
    hook = json_schema_processor(tokenizer, COLOURS, len(tokenizer) + 40)
    scores = hook(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, len(tokenizer) + 64))
    assert torch.isneginf(scores[0, len(tokenizer) :]).all()
    assert torch.isfinite(scores[0]).any()


@pytest.mark.parametrize("schema", [{"type": "no such type"}, {"$ref": "#/nowhere"}])
def test_a_broken_schema_is_a_clear_error(engine: KVBoost, schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="JSON schema"):
        engine.json_processor(schema)


def test_what_the_grammar_cannot_hold_is_logged(engine: KVBoost, caplog: pytest.LogCaptureFixture) -> None:
    engine.json_processor({"type": "string", "format": "no-such-format-1"})
    assert "no-such-format-1" in caplog.text


def test_the_missing_package_is_named_with_its_pip_command(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvboost-rag\[structured\]'"):
        engine.json_processor(COLOURS)


# --- tool calls ---------------------------------------------------------------------------------------------


def test_a_forced_call_names_a_tool_and_fills_its_arguments(engine: KVBoost) -> None:
    tools = [tool("paint", COLOURS), tool("stop", {"type": "object", "properties": {}})]
    for seed in range(2):
        hooks = [engine.json_processor(tool_call_schema(tools))]
        call = json.loads(engine.generate("Call: ", temperature=3.0, seed=seed, logits_processors=hooks).text)
        assert set(call) == {"name", "arguments"}
        assert call["name"] in ("paint", "stop")
        assert set(call["arguments"]) == ({"colour", "count"} if call["name"] == "paint" else set())


def test_one_tool_can_be_named(engine: KVBoost) -> None:
    tools = [tool("paint", COLOURS), tool("stop", {})]
    schema = tool_call_schema(tools, "stop")
    assert schema["properties"]["name"] == {"const": "stop"}
    with pytest.raises(UnknownOptionError, match="known: paint, stop"):
        tool_call_schema(tools, "go")
    with pytest.raises(UsageError, match="no tools"):
        tool_call_schema([])


def test_definitions_of_two_tools_do_not_mix(engine: KVBoost) -> None:
    def with_definition(values: list[str]) -> dict[str, Any]:
        kind = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "required": ["kind"]}
        return {**kind, "$defs": {"Kind": {"enum": values}}}

    tools = [tool("animal", with_definition(["cat", "dog"])), tool("plant", with_definition(["oak", "elm"]))]
    for name, values in (("animal", ("cat", "dog")), ("plant", ("oak", "elm"))):
        hooks = [engine.json_processor(tool_call_schema(tools, name))]
        call = json.loads(engine.generate("Call: ", logits_processors=hooks).text)
        assert call["arguments"]["kind"] in values


def test_or_schema_lets_an_answer_come_instead(engine: KVBoost) -> None:
    schema = tool_call_schema([tool("stop", {})], or_schema=COLOURS)
    for seed in range(3):
        hooks = [engine.json_processor(schema)]
        answer = json.loads(engine.generate("Go: ", temperature=5.0, seed=seed, logits_processors=hooks).text)
        assert set(answer) in ({"name", "arguments"}, {"colour", "count"})


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "object", "properties": {"a": {}}},
            "open": {"type": "object", "properties": {}, "additionalProperties": True},
            "map": {"type": "object"},
        },
        "allOf": [{"properties": {"b": {}}}],
    }
    closed = close_objects(schema)
    assert "additionalProperties" not in closed
    assert closed["properties"]["properties"]["additionalProperties"] is False
    assert closed["properties"]["open"]["additionalProperties"] is True
    assert "additionalProperties" not in closed["properties"]["map"]
    assert "additionalProperties" not in closed["allOf"][0]
    assert "additionalProperties" not in schema["properties"]["properties"]  # the input is left alone
