"""``ChatKVBoost``: a LangChain chat model whose retrieved chunks skip prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import (
    BaseChatModel,
    agenerate_from_stream,
    generate_from_stream,
)
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, model_validator

from kvboost_rag import KVBoost, __version__
from langchain_kvboost_rag._call import ChatCall, normal_choice, prepare_chat
from langchain_kvboost_rag._chunks import PROVIDER, ChunkMaker
from langchain_kvboost_rag._fields import DEFAULT_MAX_TOKENS, KVBoostFields
from langchain_kvboost_rag._structured import structured_output

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatKVBoost(KVBoostFields, BaseChatModel):
    """A chat model on this machine that computes the KV of each retrieved chunk once.

    ::

        llm = ChatKVBoost(model="smollm2", temperature=0, max_tokens=64)
        answer = llm.invoke([("system", "Answer from the context.\\n\\n" + context), ("human", question)])
        answer.usage_metadata["input_token_details"]["cache_read"]   # prompt tokens that were not computed
        answer.response_metadata["kvboost"]["chunks"]                # per chunk: hit or miss, and why

    Options of a call (``invoke(..., temperature=1)``, ``bind(...)``): the sampling fields, ``max_tokens``, ``stop``,
    ``reuse``, ``repair``, ``template_kwargs``, ``timeout``, ``model``, ``tools``, ``tool_choice``,
    ``response_format``, ``logits_processors``, and ``chunks`` (texts known to be chunks of the prompt).

    Raises (when called):
        UsageError: a wrong option, or content that a text model cannot read. TokenizerError: no chat template, or it
        refuses these messages. ContextLengthError: beyond the window. MissingExtraError: a tool or a schema is forced
        without the extra ``structured``. TimeoutError: ``timeout`` passed.
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    @model_validator(mode="after")
    def _set_kvboost_version(self) -> ChatKVBoost:
        self._add_version("langchain-kvboost-rag", __version__)
        if self.profile is None:  # the base class asks before there is an engine reference
            self.profile = self._resolve_model_profile()
        return self

    def engine_for(self, model: str | None = None) -> KVBoost:
        """The engine of this object, or of another model with the same settings; loaded if need be."""
        engine = super().engine_for(model)
        if self.profile is not None and (model is None or model == self.model):
            self.profile.setdefault("max_input_tokens", engine.adapter.max_tokens)
        return engine

    # -- answers -----------------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _with_output(generate_from_stream(self._stream(messages, stop, None, **kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = self._astream(messages, stop, None, **kwargs)
        try:
            return _with_output(await agenerate_from_stream(chunks))
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = prepare_chat(self, messages, stop, kwargs)
        maker = ChunkMaker(call)
        pieces = call.engine.stream(call.messages, **call.options)
        with call.deadline:
            try:
                for piece in pieces:
                    for chunk in maker.push(piece):
                        if run_manager:
                            run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                        yield chunk
            finally:
                pieces.close()  # type: ignore[attr-defined]

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        # Loading, rendering and compiling a grammar take time that belongs to no event loop.
        call: ChatCall = await asyncio.to_thread(prepare_chat, self, messages, stop, kwargs)
        maker = ChunkMaker(call)
        pieces = call.engine.astream(call.messages, **call.options)
        with call.deadline:
            try:
                async for piece in pieces:
                    for chunk in maker.push(piece):
                        if run_manager:
                            await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                        yield chunk
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        known = [output for output in llm_outputs if output]  # an answer from the cache has none
        usage: dict[str, int] = {}
        for output in known:
            for name, count in output["token_usage"].items():
                usage[name] = usage.get(name, 0) + count
        return {"token_usage": usage, "model_name": known[0]["model_name"] if known else self.model}

    # -- tools and structure -----------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools. ``tool_choice``: None or ``"auto"`` leaves it to the model, ``"none"`` hides them; ``"any"``,
        ``"required"``, True or a tool's name forces a call by constrained decoding (extra ``structured``)."""
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        choice = normal_choice(tool_choice, formatted)
        if choice is not None:
            kwargs["tool_choice"] = choice
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as objects of ``schema`` (Pydantic class, TypedDict or JSON schema). The grammar guarantees the form:
        ``"json_schema"`` (the schema is also told in the prompt), ``"function_calling"`` (as a forced tool call),
        ``"json_mode"`` (any JSON object; say in the prompt what it should hold). ``strict=False`` allows properties
        that an object does not list.

        Raises (when called):
            OutputParserException: cut off by ``max_tokens``, or the values do not pass the class's own checks.
        """
        llm = self.model_copy(update=kwargs) if kwargs else self
        return structured_output(llm, schema, method, include_raw, strict)

    # -- what frameworks ask for -------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "kvboost-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.settings()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = str(kwargs.get("model") or self.model)
        params["ls_temperature"] = kwargs.get("temperature", self.temperature)
        params["ls_max_tokens"] = kwargs.get("max_tokens", self.max_tokens) or DEFAULT_MAX_TOKENS
        if stop or self.stop_sequences:
            params["ls_stop"] = list(stop or self.stop_sequences or [])
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        if self.engine is None:
            return None
        profile = ModelProfile(
            max_output_tokens=self.max_tokens or DEFAULT_MAX_TOKENS,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
        )
        window = self.window()
        if window is not None:
            profile["max_input_tokens"] = window
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` by the model's own tokenizer."""
        return self.token_ids(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of these messages, chat template and tools included."""
        call = prepare_chat(self, messages, None, {"tools": list(tools or ())})
        shape = {k: v for k, v in call.options.items() if k in ("tools", "template_kwargs")}
        return call.engine.count_tokens(call.messages, **shape)


def _with_output(result: ChatResult) -> ChatResult:
    """``llm_output`` as callers of ``generate`` know it."""
    message = result.generations[0].message
    assert isinstance(message, AIMessage), "we made it"
    known = message.usage_metadata
    usage = {"prompt_tokens": known["input_tokens"], "completion_tokens": known["output_tokens"]} if known else {}
    result.llm_output = {"token_usage": usage, "model_name": message.response_metadata.get("model_name")}
    return result
