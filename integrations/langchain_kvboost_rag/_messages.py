"""LangChain messages to plain chat messages, and the documents that travel inside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvboost_rag.errors import UsageError

_IGNORED = {"tool_use", "tool_call", "tool_call_chunk", "reasoning", "thinking", "redacted_thinking", "function_call"}
_ROLES = {"human": "user", "ai": "assistant", "function": "tool", "model": "assistant"}
ID_LENGTH = 9  # Mistral's template takes nothing but nine letters and digits


class ChatInput:
    """``messages`` as ``{"role", "content", …}`` dicts, and ``documents``: texts known to be retrieved chunks."""

    def __init__(self, messages: Sequence[BaseMessage]) -> None:
        self.documents: list[str] = []
        self._names: dict[str, str] = {}  # tool call id → tool name
        self.messages = [self._convert(message) for message in messages]

    def _convert(self, message: BaseMessage) -> dict[str, Any]:
        if isinstance(message, AIMessage):
            return self._assistant(message)
        content = self._text(message.content)
        if isinstance(message, ToolMessage):
            self.documents += [d.page_content for d in _documents(message.artifact)]
            call_id = message.tool_call_id
            name = message.name or self._names.get(call_id, "")
            return {"role": "tool", "content": content, "tool_call_id": short_id(call_id), "name": name}
        if isinstance(message, HumanMessage):
            return {"role": "user", "content": content}
        if isinstance(message, SystemMessage):
            return {"role": "system", "content": content}
        if isinstance(message, FunctionMessage):
            return {"role": "tool", "content": content, "name": message.name, "tool_call_id": short_id(message.name)}
        if isinstance(message, ChatMessage):
            return {"role": _ROLES.get(message.role, message.role), "content": content}
        raise UsageError(f"a {type(message).__name__} cannot be part of a prompt")

    def _assistant(self, message: AIMessage) -> dict[str, Any]:
        # .text joins the text of every content format, v1 blocks included, and leaves out calls and reasoning.
        out: dict[str, Any] = {"role": "assistant", "content": str(message.text)}
        if message.tool_calls:
            out["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return out

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        call_id = str(call.get("id") or call["name"])
        self._names[call_id] = call["name"]
        function = {"name": call["name"], "arguments": call["args"]}
        return {"id": short_id(call_id), "type": "function", "function": function}

    def _text(self, content: str | Sequence[Any]) -> str:
        if isinstance(content, str):
            return content
        return "\n\n".join(part for block in content for part in self._block(block))

    def _block(self, block: Any) -> Iterator[str]:
        """Texts of one content block; the text of a document block is a chunk."""
        if isinstance(block, str):
            yield block
            return
        kind = block.get("type")
        if kind == "text":
            if _is_marked(block):
                self.documents.append(block["text"])
            yield block["text"]
        elif kind in ("text-plain", "document", "search_result"):
            yield from self._document(block)
        elif kind == "json":
            yield str(block.get("json", ""))
        elif kind not in _IGNORED:
            raise UsageError(
                f"a content block of type {kind!r} cannot be read by a text model",
                hint="send text, text-plain or document blocks; images and audio are not supported",
            )

    def _document(self, block: Mapping[str, Any]) -> Iterator[str]:
        texts = list(_block_texts(block))
        self.documents += texts
        title = block.get("title")
        if title and texts:
            yield f"{title}\n{texts[0]}"
            texts = texts[1:]
        yield from texts


def _block_texts(block: Mapping[str, Any]) -> Iterator[str]:
    """Text of a ``text-plain`` block, of an Anthropic-style document or of a search result."""
    if isinstance(block.get("text"), str):
        yield block["text"]
        return
    source = block.get("source")
    inner = block.get("content") or (source if isinstance(source, Mapping) else None)
    if isinstance(inner, str):
        yield inner
    elif isinstance(inner, Mapping) and isinstance(inner.get("data"), str) and inner.get("type") == "text":
        yield inner["data"]
    elif isinstance(inner, Mapping) and isinstance(inner.get("content"), (list, str)):
        yield from _block_texts({"content": inner["content"]})
    elif isinstance(inner, list):
        for part in inner:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]
    else:
        raise UsageError("a document block without text", hint="PDF and image documents are not supported")


def _is_marked(block: Mapping[str, Any]) -> bool:
    """``{"type": "text", "text": …, "extras": {"kvboost": "chunk"}}`` says: this is a chunk."""
    extras = block.get("extras")
    return isinstance(extras, Mapping) and bool(extras.get("kvboost"))


def _documents(artifact: Any) -> Iterator[Document]:
    if isinstance(artifact, Document):
        yield artifact
    elif isinstance(artifact, Iterable) and not isinstance(artifact, (str, bytes)):
        items = artifact.values() if isinstance(artifact, Mapping) else artifact
        for item in items:
            if isinstance(item, Document):
                yield item
            elif isinstance(item, (list, tuple)):
                yield from _documents(item)


def short_id(call_id: str) -> str:
    """A call id that every chat template takes; the same id gives the same one."""
    if len(call_id) == ID_LENGTH and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:ID_LENGTH]
