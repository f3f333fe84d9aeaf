"""Tool calls: what the model is asked for, and how its answer is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from llama_index.core.base.llms.types import ToolCallBlock

from kvboost_rag.errors import UsageError

Spec = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")


def tool_name(spec: Spec) -> str:
    """The function's name."""
    return str(spec["function"]["name"])


def choose(tools: Sequence[Spec], choice: Any, required: bool = False) -> tuple[list[Spec], bool]:
    """The tools on offer and whether one of them must be called.

    ``choice``: None, ``"auto"``, ``"none"``, ``"any"`` or ``"required"``, a tool's name, or OpenAI's dict.

    Raises:
        UsageError: no such tool.
    """
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name", choice.get("type"))
    if choice == "none" or not tools:
        return [], False
    if choice in (None, "auto", False):
        return list(tools), required
    if choice in ("any", "required", True):
        return list(tools), True
    named = [t for t in tools if tool_name(t) == choice]
    if not named:
        raise UsageError(f"there is no tool {choice!r} to choose", hint=f"tools: {', '.join(map(tool_name, tools))}")
    return named, True


def call_schema(tools: Sequence[Spec]) -> dict[str, Any]:
    """JSON schema of ``{"name": ..., "arguments": {...}}`` over all ``tools``; their ``$defs`` are lifted to the root."""
    definitions: dict[str, Any] = {}
    variants = [_variant(tool, index, definitions) for index, tool in enumerate(tools)]
    schema = dict(variants[0]) if len(variants) == 1 else {"anyOf": variants}
    return {**schema, "$defs": definitions} if definitions else schema


def _variant(tool: Spec, index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})
    own = {**parameters.pop("$defs", {}), **parameters.pop("definitions", {})}
    text = json.dumps([parameters, own])
    for name in own:
        for place in ("$defs", "definitions"):
            text = text.replace(f'"#/{place}/{name}"', f'"#/$defs/{index}.{name}"')
    parameters, own = json.loads(text)
    definitions.update({f"{index}.{name}": definition for name, definition in own.items()})
    parameters.setdefault("type", "object")
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [tool_name(tool)]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def read_calls(text: str, tools: Sequence[Spec]) -> tuple[str, list[ToolCallBlock]]:
    """``(rest of the text, calls)``. Reads ``<tool_call>`` tags and bare JSON; only names on offer count as calls."""
    names = {tool_name(tool) for tool in tools}
    tagged = [call for body in _TAGGED.findall(text) for call in _calls_in(body, names)]
    if tagged:
        return _TAGGED.sub("", text).strip(), tagged
    body = text.strip()
    for mark in _MARKS:
        body = body.removeprefix(mark).strip()
    fenced = _FENCE.match(body)
    calls = _calls_in(fenced[1] if fenced else body, names)
    return ("", calls) if calls else (text, [])


def _calls_in(body: str, names: set[str]) -> list[ToolCallBlock]:
    try:
        value = json.loads(body)
    except json.JSONDecodeError:
        return []
    return [b for item in (value if isinstance(value, list) else [value]) if (b := _block(item, names))]


def _block(item: Any, names: set[str]) -> ToolCallBlock | None:
    if not isinstance(item, dict):
        return None
    item = item.get("function", item) if isinstance(item.get("function"), dict) else item
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    if item.get("name") not in names or not isinstance(arguments, dict):
        return None
    return new_call(str(item["name"]), arguments)


def new_call(name: str, arguments: dict[str, Any]) -> ToolCallBlock:
    """A call with a fresh id."""
    return ToolCallBlock(tool_call_id=f"call_{uuid4().hex[:24]}", tool_name=name, tool_kwargs=arguments)


def parsed_by_template(tokenizer: Any, raw: str, tools: Sequence[Spec]) -> tuple[str, list[ToolCallBlock]] | None:
    """The same by the tokenizer's own response parser, or None where it has none or it cannot read ``raw`` (the answer
    with its special tokens)."""
    if not getattr(tokenizer, "response_template", None):
        return None
    try:
        message = tokenizer.parse_response(raw, prefix="", tools=list(tools))
    except Exception:  # whatever a template's own parser stumbles over: our reader has the next try
        return None
    names = {tool_name(tool) for tool in tools}
    calls = [block for item in message.get("tool_calls") or [] if (block := _block(item, names))]
    return str(message.get("content") or ""), calls
