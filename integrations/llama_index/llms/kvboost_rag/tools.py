"""Tool calls: what the model is asked for, and how its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from llama_index.core.base.llms.types import ToolCallBlock

from kvboost_rag import KVBoost, Result, parse_native, parse_tool_calls
from kvboost_rag.errors import UsageError

Spec = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


def tool_name(spec: Spec) -> str:
    """The function's name."""
    return str(spec["function"]["name"])


def choose(tools: Sequence[Spec], choice: Any) -> tuple[list[Spec], bool]:
    """The tools on offer and whether one of them must be called.

    ``choice``: None, ``"auto"``, ``"none"``, ``"any"``, ``"required"``, a bool, a tool's name, or OpenAI's dict.

    Raises:
        UsageError: no such tool.
    """
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name", choice.get("type"))
    if choice == "none" or not tools:
        return [], False
    if choice in (None, "auto", False):
        return list(tools), False
    if choice in ("any", "required", True):
        return list(tools), True
    named = [t for t in tools if tool_name(t) == choice]
    if not named:
        raise UsageError(f"there is no tool {choice!r} to choose", hint=f"tools: {', '.join(map(tool_name, tools))}")
    return named, True


def new_call(name: str, arguments: dict[str, Any]) -> ToolCallBlock:
    """A call with a fresh id."""
    return ToolCallBlock(tool_call_id=f"call_{uuid4().hex[:24]}", tool_name=name, tool_kwargs=arguments)


def read_calls(
    engine: KVBoost, result: Result, prompt: Any, tools: Sequence[Spec], *, forced: bool
) -> tuple[str, list[ToolCallBlock]]:
    """``(text beside the calls, calls)`` of an answer; calls of tools that were not on offer stay text."""
    found = None
    if not forced and getattr(engine.adapter.tokenizer, "response_template", None):
        rendered = prompt if isinstance(prompt, str) else engine.render(prompt, tools=list(tools))
        found = parse_native(engine.adapter.tokenizer, engine.tokens.decode(result.token_ids), rendered, tools)
    if found is None or not found.calls:
        found = parse_tool_calls(result.text, [tool_name(t) for t in tools], forced=forced)
    names = {tool_name(t) for t in tools}
    if not found.calls or found.bad or any(call.name not in names for call in found.calls):
        return result.text, []
    return found.text, [new_call(call.name, call.arguments) for call in found.calls]
