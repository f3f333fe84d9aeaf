"""LlamaIndex chat messages to the plain dicts that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kvboost_rag.errors import UsageError

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Roles, texts, tool calls and tool results; blocks of one message are joined by a line end, as ``.content`` does.

    Raises:
        UsageError: a block that is no text (image, audio, video, binary document).
    """
    return [_to_dict(message) for message in messages]


def _to_dict(message: ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _ROLES[message.role], "content": "\n".join(_texts(message.blocks))}
    if out["role"] == "assistant":
        calls = [_call(b) for b in message.blocks if isinstance(b, ToolCallBlock)] or _legacy_calls(message)
        if calls:
            out["tool_calls"] = calls
    if out["role"] == "tool":
        extra = message.additional_kwargs
        out |= {k: extra[k] for k in ("tool_call_id", "name") if extra.get(k)}
    return out


def _texts(blocks: Iterable[Any]) -> Iterable[str]:
    for block in blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, CitableBlock):
            yield from _texts(block.content)
        elif isinstance(block, CitationBlock):
            yield from _texts([block.cited_content])
        elif isinstance(block, DocumentBlock):
            yield _document_text(block)
        elif not isinstance(block, (CachePoint, ThinkingBlock, ToolCallBlock)):
            raise UsageError(
                f"a {type(block).__name__} in a message: this model reads text only",
                hint="pass TextBlock or str content",
            )


def _document_text(block: DocumentBlock) -> str:
    mime = block.document_mimetype or ""
    if not mime.startswith("text/"):
        raise UsageError(
            f"a document of type {mime or 'unknown'} in a message: this model reads text only",
            hint="extract its text first (SimpleDirectoryReader does)",
        )
    raw = block.resolve_document().read()
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _call(block: ToolCallBlock) -> dict[str, Any]:
    return _function_call(block.tool_call_id, block.tool_name, block.tool_kwargs)


def _legacy_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """Calls of messages that were made by an older integration (OpenAI's dicts in ``additional_kwargs``)."""
    calls = message.additional_kwargs.get("tool_calls") or []
    functions = [
        (c.get("id"), c["function"]) for c in calls if isinstance(c, dict) and isinstance(c.get("function"), dict)
    ]
    return [_function_call(id_, f.get("name", ""), f.get("arguments") or {}) for id_, f in functions]


def _function_call(call_id: str | None, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            arguments = {"input": arguments}
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}
