"""Pieces of the engine to LangChain's message chunks. One way for ``invoke`` and ``stream``: they cannot differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from kvboost_rag import CallFilter, ParsedAnswer, Piece, Report, Result, parse_native, parse_tool_calls
from langchain_kvboost_rag._call import ChatCall

PROVIDER = "kvboost"


class ChunkMaker:
    """Feed it pieces; it yields chunks. Text that may be a tool call is held back until it is known."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._native = bool(call.tools) and getattr(call.engine.tokenizer, "response_template", None) is not None
        self._filter = CallFilter() if call.tools and not self._whole else None

    @property
    def _whole(self) -> bool:
        return self._call.forced or self._native

    def push(self, piece: Piece) -> Iterator[ChatGenerationChunk]:
        """Chunks for one piece; the last piece (with the result) gives the calls, then usage and metadata."""
        text = piece.text
        if self._whole:
            text = ""
        elif self._filter is not None:
            text = self._filter.push(text)
        if text:
            yield _text_chunk(text)
        if piece.result is not None:
            self._call.deadline.check(piece.result.finish_reason)
            yield from self._end(piece.result)

    def _end(self, result: Result) -> Iterator[ChatGenerationChunk]:
        parsed = self._parse(result)
        if parsed.text:
            yield _text_chunk(parsed.text)
        for chunk in _call_chunks(parsed):
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[chunk]))
        reason = "tool_calls" if parsed.calls else result.finish_reason
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                usage_metadata=usage(result.report),
                response_metadata=response_metadata(result.report, reason, self._call.model_name),
                chunk_position="last",
            ),
            generation_info={"finish_reason": reason},
        )

    def _parse(self, result: Result) -> ParsedAnswer:
        if not self._call.tools:
            return ParsedAnswer("")  # all of it went out as it came
        if self._native and not self._call.forced:
            native = self._parse_native(result)
            if native is not None:
                return native
        held = result.text if self._whole else self._filter.finish() if self._filter else ""
        parsed = parse_tool_calls(held, self._call.tool_names, forced=self._call.forced)
        # What was meant as a call and is none must not get lost: it stays readable in the content.
        return ParsedAnswer(held, (), parsed.bad) if parsed.bad and not parsed.calls else parsed

    def _parse_native(self, result: Result) -> ParsedAnswer | None:
        tokenizer = self._call.engine.tokenizer
        ids = [i for i in result.token_ids if i != tokenizer.eos_token_id]
        raw = str(tokenizer.decode(ids, skip_special_tokens=False))
        return parse_native(tokenizer, raw, self._call.prompt_text(), self._call.tools)


def _text_chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def _call_chunks(parsed: ParsedAnswer) -> Iterator[Any]:
    for index, call in enumerate(parsed.calls):
        args = json.dumps(call.arguments, ensure_ascii=False)
        yield tool_call_chunk(name=call.name, args=args, id=uuid4().hex[:9], index=index)
    for index, bad in enumerate(parsed.bad, start=len(parsed.calls)):
        # As a JSON string: a broken object would be completed by LangChain and taken for a call.
        yield tool_call_chunk(name=None, args=json.dumps(bad.text), id=uuid4().hex[:9], index=index)


def usage(report: Report) -> UsageMetadata:
    """Token counts; ``cache_read`` are reused prompt tokens, ``cache_creation`` those stored for next time."""
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.new_tokens,
        total_tokens=report.prompt_tokens + report.new_tokens,
        input_token_details={"cache_read": int(report.reused_tokens), "cache_creation": int(report.stored_tokens)},
    )


def response_metadata(report: Report, finish_reason: str, model_name: str) -> dict[str, Any]:
    """Plain values only: messages are kept in histories, caches and traces, and must hold no tensors."""
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": finish_reason,
        "kvboost": report.as_dict(),
    }
