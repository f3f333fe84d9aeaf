"""``KVBoostLLM``: the engine as a LlamaIndex language model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.kvboost_rag.calls import build_options, json_processors, shrunk
from llama_index.llms.kvboost_rag.messages import to_dicts
from llama_index.llms.kvboost_rag.responses import Call, ChatAssembler, completion_end, completion_piece
from llama_index.llms.kvboost_rag.settings import ConfiguredLLM
from llama_index.llms.kvboost_rag.tools import choose

from kvboost_rag import Piece, Result, fit_messages, tool_call_schema
from kvboost_rag.errors import ContextLengthError


class KVBoostLLM(ConfiguredLLM):
    """A local model that answers from retrieved nodes without prefilling them again.

    ``KVBoostLLM(model="smollm2")`` loads the model (once per process), ``KVBoostLLM(engine=engine)`` takes a
    :class:`kvboost_rag.KVBoost` that exists. Every call may override ``temperature``, ``max_tokens``, ``top_p``,
    ``top_k``, ``repetition_penalty``, ``seed``, ``stop``, ``reuse``, ``repair``, ``chunks``, ``template_kwargs``.
    ``response.raw`` is ``{"usage": …, "report": …, "finish_reason": …, "model": …}``, plain JSON.

    Raises:
        KVBoostError: the model cannot be loaded, or an option makes no sense.
    """

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised form."""
        return "KVBoostLLM"

    # -- requests ----------------------------------------------------------------------------------------------------

    # Async callers prepare their calls in a thread as well: a first use may load a model or build a grammar.

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Call:
        kwargs = dict(kwargs)
        tools, forced = choose(kwargs.pop("tools", None) or [], kwargs.pop("tool_choice", None))
        single, schema = not kwargs.pop("allow_parallel_tool_calls", True), kwargs.pop("json_schema", None)
        if self.messages_to_prompt is not generic_messages_to_prompt or not self.is_chat_model:
            call = self._call(self.messages_to_prompt(messages), kwargs)  # type: ignore[misc]
        else:
            dicts, native = fit_messages(self.tokenizer, to_dicts(messages), tools)
            call = self._call(dicts, {**kwargs, "tools": native} if native else kwargs)
        call.tools, call.forced, call.single = tools, forced, single
        if forced or schema:
            wanted = tool_call_schema(tools) if forced else schema
            given = list(call.options.get("logits_processors") or ())
            call.options["logits_processors"] = [*given, *json_processors(call.engine, wanted)]
        return call

    def _completion_call(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Call:
        """A prompt that nobody formatted becomes a user message where the model has a chat template: a bare
        continuation would never end."""
        if formatted:
            return self._call(prompt, kwargs)
        if self.completion_to_prompt is not default_completion_to_prompt:
            return self._call(self.completion_to_prompt(prompt), kwargs)  # type: ignore[misc]
        if not self.is_chat_model:
            return self._call(prompt, kwargs)
        return self._chat_call([ChatMessage(role=MessageRole.USER, content=prompt)], kwargs)

    def _call(self, prompt: str | list[dict[str, Any]], kwargs: dict[str, Any]) -> Call:
        options = build_options(self._defaults(), kwargs)
        standing: list[str] = []
        if options["reuse"] == "chunks" and len(self._retrieved):
            text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            standing = self._retrieved.standing_in(text)
            named = options.get("chunks", ())
            options["chunks"] = [*([named] if isinstance(named, str) else named), *standing]
        may_shrink = not {"max_tokens", "max_new_tokens"} & kwargs.keys()
        return Call(self.engine, prompt, options, self.model, standing=standing, may_shrink=may_shrink)

    def _pieces(self, call: Call) -> Iterator[Piece]:
        try:
            yield from call.engine.stream(call.prompt, **call.options)
        except ContextLengthError as error:
            yield from call.engine.stream(call.prompt, **shrunk(call, error))
        self._retrieved.settle(call.standing)

    async def _apieces(self, call: Call) -> AsyncGenerator[Piece]:
        try:
            async with aclosing(call.engine.astream(call.prompt, **call.options)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
        except ContextLengthError as error:
            options = shrunk(call, error)
            async with aclosing(call.engine.astream(call.prompt, **options)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
        self._retrieved.settle(call.standing)

    def _run(self, call: Call) -> Result:
        *_, last = self._pieces(call)
        assert last.result is not None, "the last piece carries the result"
        return last.result

    async def _arun(self, call: Call) -> Result:
        last: Piece | None = None
        async with aclosing(self._apieces(call)) as pieces:
            async for piece in pieces:
                last = piece
        assert last is not None, "there is a last piece"
        assert last.result is not None, "and it carries the result"
        return last.result

    # -- the eight methods -------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        call = self._chat_call(messages, kwargs)
        return ChatAssembler(call).finish(self._run(call))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer piece by piece; the last response carries usage and tool calls."""
        call = self._chat_call(messages, kwargs)

        def generate() -> ChatResponseGen:
            assembler = ChatAssembler(call)
            for piece in self._pieces(call):
                yield assembler.finish(piece.result) if piece.result else assembler.push(piece.text)

        return generate()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer without blocking the event loop; a cancelled task stops the computation."""
        call = await asyncio.to_thread(self._chat_call, messages, kwargs)
        return ChatAssembler(call).finish(await self._arun(call))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """:meth:`stream_chat` without blocking the event loop."""
        call = await asyncio.to_thread(self._chat_call, messages, kwargs)

        async def generate() -> ChatResponseAsyncGen:
            assembler = ChatAssembler(call)
            async with aclosing(self._apieces(call)) as pieces:
                async for piece in pieces:
                    yield assembler.finish(piece.result) if piece.result else assembler.push(piece.text)

        return generate()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text. ``formatted``: the text is the whole prompt, control tokens included, and is left alone."""
        call = self._completion_call(prompt, formatted, kwargs)
        return completion_end(self._run(call), self.model)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """:meth:`complete`, piece by piece."""
        call = self._completion_call(prompt, formatted, kwargs)

        def generate() -> CompletionResponseGen:
            text = ""
            for piece in self._pieces(call):
                text += piece.text
                yield completion_end(piece.result, self.model) if piece.result else completion_piece(text, piece.text)

        return generate()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """:meth:`complete` without blocking the event loop."""
        call = await asyncio.to_thread(self._completion_call, prompt, formatted, kwargs)
        return completion_end(await self._arun(call), self.model)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete` without blocking the event loop."""
        call = await asyncio.to_thread(self._completion_call, prompt, formatted, kwargs)

        async def generate() -> CompletionResponseAsyncGen:
            text = ""
            async with aclosing(self._apieces(call)) as pieces:
                async for piece in pieces:
                    text += piece.text
                    yield (
                        completion_end(piece.result, self.model) if piece.result else completion_piece(text, piece.text)
                    )

        return generate()
