"""``KVBoostLLM``: a LangChain text-in, text-out model whose retrieved chunks skip prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from kvboost_rag import KVBoost, Piece, fit_messages
from langchain_kvboost_rag._call import Deadline
from langchain_kvboost_rag._chunks import PROVIDER, response_metadata, usage
from langchain_kvboost_rag._fields import DEFAULT_MAX_TOKENS, SAMPLING, KVBoostFields, warn_unknown_call_options
from langchain_kvboost_rag._known import chunks_in

_KNOWN = {
    *SAMPLING, "max_tokens", "max_new_tokens", "reuse", "repair", "logits_processors", "chunks", "model", "timeout",
    "template_kwargs",
}  # fmt: skip


@dataclass
class _TextCall:
    engine: KVBoost
    model_name: str
    prompt: Any
    options: dict[str, Any]
    deadline: Deadline


class KVBoostLLM(KVBoostFields, BaseLLM):
    """A text model on this machine that computes the KV of each retrieved chunk once. Fields as ``ChatKVBoost``.

    LangChain hands chat prompts to such models as plain text (``"System: …\\nHuman: …"``). An instruct model answers
    better, and knows when to end, with its own template: set ``apply_chat_template=True`` (the whole text becomes one
    user message), or use :class:`ChatKVBoost`. Answers never repeat the prompt.
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    apply_chat_template: bool = False

    def _prepare(self, prompt: str, stop: list[str] | None, kwargs: dict[str, Any]) -> _TextCall:
        warn_unknown_call_options(kwargs, _KNOWN)
        engine = self.engine_for(kwargs.get("model"))
        options = self.call_options(stop, kwargs)
        given: Any = prompt
        if self.apply_chat_template:
            given = fit_messages(engine.tokenizer, [{"role": "user", "content": prompt}])[0]
            options["template_kwargs"] = {**self.template_kwargs, **(kwargs.get("template_kwargs") or {})}
        if options["reuse"] == "chunks":
            options["chunks"] = chunks_in(engine, [prompt], [], kwargs.get("chunks") or ())
        deadline = Deadline(kwargs.get("timeout", self.timeout))
        options["cancel"] = deadline.token
        return _TextCall(engine, str(kwargs.get("model") or self.model), given, options, deadline)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._prepare(prompt, stop, kwargs)
        pieces = call.engine.stream(call.prompt, **call.options)
        with call.deadline:
            try:
                for piece in pieces:
                    chunk = _chunk(piece, call)
                    if run_manager and chunk.text:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            finally:
                pieces.close()  # type: ignore[attr-defined]

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = await asyncio.to_thread(self._prepare, prompt, stop, kwargs)
        pieces = call.engine.astream(call.prompt, **call.options)
        with call.deadline:
            try:
                async for piece in pieces:
                    chunk = _chunk(piece, call)
                    if run_manager and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        manager = run_manager if self.streaming else None
        return _result([_joined(list(self._stream(p, stop, manager, **kwargs))) for p in prompts])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        manager = run_manager if self.streaming else None
        answers = []
        for prompt in prompts:
            chunks = self._astream(prompt, stop, manager, **kwargs)
            try:
                answers.append(_joined([chunk async for chunk in chunks]))
            finally:
                await chunks.aclose()  # type: ignore[attr-defined]
        return _result(answers)

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.settings(), "apply_chat_template": self.apply_chat_template}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = str(kwargs.get("model") or self.model)
        params["ls_temperature"] = kwargs.get("temperature", self.temperature)
        params["ls_max_tokens"] = kwargs.get("max_tokens", self.max_tokens) or DEFAULT_MAX_TOKENS
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` by the model's own tokenizer."""
        return self.token_ids(text)


def _chunk(piece: Piece, call: _TextCall) -> GenerationChunk:
    if piece.result is None:
        return GenerationChunk(text=piece.text)
    result = piece.result
    call.deadline.check(result.finish_reason)
    info = response_metadata(result.report, result.finish_reason, call.model_name)
    info["usage_metadata"] = dict(usage(result.report))
    return GenerationChunk(text=piece.text, generation_info=info)


def _joined(chunks: list[GenerationChunk]) -> Generation:
    return Generation(text="".join(c.text for c in chunks), generation_info=chunks[-1].generation_info)


def _result(answers: list[Generation]) -> LLMResult:
    details = [a.generation_info["usage_metadata"] for a in answers if a.generation_info]
    total = {
        "prompt_tokens": sum(d["input_tokens"] for d in details),
        "completion_tokens": sum(d["output_tokens"] for d in details),
        "total_tokens": sum(d["total_tokens"] for d in details),
        "cache_read_tokens": sum(d["input_token_details"]["cache_read"] for d in details),
    }
    name = answers[0].generation_info["model_name"] if answers and answers[0].generation_info else ""
    return LLMResult(generations=[[a] for a in answers], llm_output={"token_usage": total, "model_name": name})
