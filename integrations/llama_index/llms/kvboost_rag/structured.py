"""Structured prediction by decoding that can only write JSON of the wanted schema."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, TypeVar

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts.base import BasePromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index.llms.kvboost_rag.responses import json_text
from llama_index.llms.kvboost_rag.tool_calling import ToolCallingLLM
from pydantic import ValidationError

from kvboost_rag.errors import UsageError

T = TypeVar("T")
dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]

INSTRUCTION = "Answer with one JSON object of this schema and nothing else:\n"


class StructuredOutputLLM(ToolCallingLLM):
    """The ``structured_predict`` family over ``chat(..., json_schema=...)``. A ``pydantic_program_mode`` other than
    the default goes the framework's own ways (text parsing, function calling)."""

    def _native(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _asked(self, output_cls: type[Model], prompt: BasePromptTemplate, args: dict[str, Any]) -> list[ChatMessage]:
        messages = list(self._extend_messages(prompt.format_messages(llm=self, **args)))
        text = INSTRUCTION + json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
        if messages and messages[-1].role == MessageRole.USER:
            last = messages.pop()
            text = f"{last.content or ''}\n\n{text}"
        return [*messages, ChatMessage(role=MessageRole.USER, content=text)]

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An instance of ``output_cls``.

        Raises:
            UsageError: the answer does not validate (cut off at ``max_tokens``, or a rule that no schema states).
        """
        if not self._native():
            other: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return other
        _start(output_cls, prompt, prompt_args)
        messages = self._asked(output_cls, prompt, prompt_args)
        response = self.chat(messages, json_schema=output_cls.model_json_schema(), **(llm_kwargs or {}))
        return _end(_validated(output_cls, response))

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """:meth:`structured_predict` without blocking the event loop."""
        if not self._native():
            other: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return other
        _start(output_cls, prompt, prompt_args)
        messages = self._asked(output_cls, prompt, prompt_args)
        response = await self.achat(messages, json_schema=output_cls.model_json_schema(), **(llm_kwargs or {}))
        return _end(_validated(output_cls, response))

    @dispatcher.span
    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Growing partial objects; the last one is an instance of ``output_cls``."""
        if not self._native():
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        _start(output_cls, prompt, prompt_args)
        messages = self._asked(output_cls, prompt, prompt_args)
        pieces = self.stream_chat(messages, json_schema=output_cls.model_json_schema(), **(llm_kwargs or {}))
        partials = _Partials(output_cls)
        for response in pieces:
            yield from partials.push(response)
        yield _end(partials.whole())

    @dispatcher.span
    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """:meth:`stream_structured_predict` without blocking the event loop."""
        if not self._native():
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _start(output_cls, prompt, prompt_args)
        messages = self._asked(output_cls, prompt, prompt_args)
        pieces = await self.astream_chat(messages, json_schema=output_cls.model_json_schema(), **(llm_kwargs or {}))
        return _astream(output_cls, pieces)


async def _astream(
    output_cls: type[Model], pieces: AsyncIterator[ChatResponse]
) -> AsyncGenerator[Model | FlexibleModel, None]:
    partials = _Partials(output_cls)
    async for response in pieces:
        for partial in partials.push(response):
            yield partial
    yield _end(partials.whole())


class _Partials:
    """Objects as far as their JSON is written."""

    def __init__(self, output_cls: type[Any]) -> None:
        self._output_cls = output_cls
        self._flexible = create_flexible_model(output_cls)
        self._last: ChatResponse | None = None
        self._shown: dict[str, Any] = {}

    def push(self, response: ChatResponse) -> Iterator[FlexibleModel]:
        """A new partial object, if this piece added something to it."""
        self._last = response
        try:
            value = parse_partial_json(response.message.content or "")
        except ValueError:
            return
        if isinstance(value, dict) and value != self._shown:
            self._shown = value
            partial = self._flexible(**value)
            dispatcher.event(LLMStructuredPredictInProgressEvent(output=partial))
            yield partial

    def whole(self) -> Any:
        """The validated object."""
        if self._last is None:
            raise UsageError("the model gave no answer", hint="was the request cancelled?")
        return _validated(self._output_cls, self._last)


def _validated(output_cls: type[Model], response: ChatResponse) -> Model:
    text = json_text(response.message.content or "")
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        cut = (response.raw or {}).get("finish_reason") == "length"
        raise UsageError(
            f"the answer is no {output_cls.__name__}: {error}",
            hint="it was cut off; raise max_tokens" if cut else "loosen the model's own validators, or try again",
        ) from error


def _start(output_cls: type[Any], prompt: Any, args: dict[str, Any]) -> None:
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))


def _end(output: T) -> T:
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
