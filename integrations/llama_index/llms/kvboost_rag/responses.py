"""From the engine's pieces and results to LlamaIndex responses. Nothing here holds tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.utils import parse_partial_json
from llama_index.llms.kvboost_rag.tools import Spec, new_call, read_calls

from kvboost_rag import CallFilter, KVBoost, Result


@dataclass(slots=True)
class Call:
    """One request to the engine, ready to run."""

    engine: KVBoost
    prompt: str | list[dict[str, Any]]
    options: dict[str, Any]
    model: str = ""
    tools: list[Spec] = field(default_factory=list)
    forced: bool = False  # a call of one of the tools must come out
    single: bool = False  # at most one tool call
    standing: list[str] = field(default_factory=list)  # retrieved texts that stand in the prompt
    may_shrink: bool = False  # max_tokens is a default, not an order of this call


def usage_of(result: Result) -> dict[str, Any]:
    """Token counts under the names that LlamaIndex's counters read, and what the cache did."""
    report = result.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "cache_read_tokens": report.reused_tokens,
        "cache_creation_tokens": report.stored_tokens,
        "repaired_tokens": report.repaired_tokens,
        "forwarded_tokens": report.forwarded_tokens,
    }


def raw_of(result: Result, model: str) -> dict[str, Any]:
    """``ChatResponse.raw``: plain JSON."""
    return {
        "model": model,
        "finish_reason": result.finish_reason,
        "usage": usage_of(result),
        "report": result.report.as_dict(),
    }


class ChatAssembler:
    """Turns streamed text into chat responses: ``delta`` is what is new, ``message`` all so far."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._text = ""
        self._shown = ""
        self._filter = CallFilter()
        self._block: ToolCallBlock | None = None

    def push(self, text: str) -> ChatResponse:
        """The response after one more piece of text."""
        self._text += text
        if self._call.forced:
            return ChatResponse(message=_message("", self._partial()), delta="")
        shown = self._filter.push(text) if self._call.tools else text
        self._shown += shown
        return ChatResponse(message=_message(self._shown), delta=shown)

    def _partial(self) -> list[ToolCallBlock]:
        """The call as far as it is written, under one id."""
        try:
            value = parse_partial_json(self._text)
        except ValueError:
            value = None
        arguments = value.get("arguments") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(arguments, dict) or not value.get("name"):
            return []
        if self._block is None:
            self._block = new_call(str(value["name"]), arguments)
        self._block.tool_kwargs = arguments
        return [self._block.model_copy()]

    def finish(self, result: Result) -> ChatResponse:
        """The last response: the whole message, tool calls read, usage attached."""
        text, calls = self._read(result)
        if self._block is not None and len(calls) == 1:
            calls[0].tool_call_id = self._block.tool_call_id
        # What a filter held back as a possible call, and was none.
        rest = text.removeprefix(self._shown) if self._text and not calls else ""
        return ChatResponse(
            message=_message(text, calls),
            delta=rest,
            raw=raw_of(result, self._call.model),
            additional_kwargs=usage_of(result),
        )

    def _read(self, result: Result) -> tuple[str, list[ToolCallBlock]]:
        call = self._call
        if not call.tools:
            return result.text, []
        text, calls = read_calls(call.engine, result, call.prompt, call.tools, forced=call.forced)
        return text, calls[:1] if call.single else calls


def _message(text: str, calls: list[ToolCallBlock] | None = None) -> ChatMessage:
    blocks: list[Any] = [TextBlock(text=text)] if text or not calls else []
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=[*blocks, *(calls or [])])


def completion_piece(text: str, delta: str) -> CompletionResponse:
    """A streamed completion: all text so far, and what is new."""
    return CompletionResponse(text=text, delta=delta)


def completion_end(result: Result, model: str) -> CompletionResponse:
    """The last (or only) completion, usage attached."""
    return CompletionResponse(text=result.text, delta="", raw=raw_of(result, model), additional_kwargs=usage_of(result))


def json_text(text: str) -> str:
    """The JSON object inside an answer (bare, fenced, or after some words)."""
    start, end = text.find("{"), text.rfind("}")
    body = text[start : end + 1] if 0 <= start < end else text
    try:
        json.loads(body)
    except json.JSONDecodeError:
        return text
    return body
