"""What an engine answers: generate, stream and score, one at a time or in a list, blocking or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvboost_rag.aio import iterate
from kvboost_rag.config import Repair, Reuse
from kvboost_rag.engine.decode import CancelToken
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import PromptInput, Request
from kvboost_rag.engine.result import Piece, Result, Score
from kvboost_rag.errors import UsageError
from kvboost_rag.model.adapter import ModelAdapter


class Answers:
    """The asking half of :class:`~kvboost_rag.KVBoost`, which sets these."""

    adapter: ModelAdapter
    engine: Engine
    reuse: Reuse
    repair: Repair
    _pool: ThreadPoolExecutor

    def generate(self, prompt: PromptInput, **options: Any) -> Result:
        """Answer a string, a list of chat messages or a list of token ids.

        Options: ``max_new_tokens`` (256), ``temperature`` (0: greedy), ``top_p``, ``top_k``, ``repetition_penalty``,
        ``seed``, ``stop`` (strings), ``chunks`` (texts known to be chunks of the prompt; unknown ones are computed,
        and stored after the answer), ``reuse``, ``repair``, ``tools``, ``cancel`` (a :class:`CancelToken`),
        ``logits_processors``, ``template_kwargs``.

        Raises:
            UsageError: an unknown option or a wrong value. EmptyPromptError, ContextLengthError, TokenizerError.
        """
        return _last(self.stream(prompt, **options))

    def stream(self, prompt: PromptInput, **options: Any) -> Iterator[Piece]:
        """Like :meth:`generate`, piece by piece; the last piece carries the result. Closing the iterator stops."""
        return self.engine.run(self._request(prompt, options))

    def generate_batch(self, prompts: Sequence[PromptInput], **options: Any) -> list[Result]:
        """Answer several prompts with the same options, one after the other; all are checked before the first runs."""
        if isinstance(prompts, str):
            raise UsageError("generate_batch takes several prompts, got one string", hint="pass [prompt]")
        requests = [self._request(p, options) for p in prompts]
        return [_last(self.engine.run(r)) for r in requests]

    async def agenerate(self, prompt: PromptInput, **options: Any) -> Result:
        """:meth:`generate` without blocking the event loop; cancelling the task stops the computation."""
        result: Result | None = None
        async for piece in self.astream(prompt, **options):
            result = piece.result or result
        assert result is not None, "the last piece carries the result"
        return result

    async def astream(self, prompt: PromptInput, **options: Any) -> AsyncIterator[Piece]:
        """:meth:`stream` for async callers; requests wait in a queue, one runs at a time."""
        request = self._request(prompt, options)
        request = replace(request, cancel=CancelToken(request.cancel))  # leaving early is this request's affair alone
        pieces = iterate(lambda: self.engine.run(request), self._pool, request.cancel)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def score(
        self, prompt: PromptInput, continuation: str | Sequence[int], *, logits: bool = False, **options: Any
    ) -> Score:
        """Log-probabilities of ``continuation`` after ``prompt`` on the same reuse path: the fidelity probe."""
        ids = continuation if isinstance(continuation, str) else [int(i) for i in continuation]
        with self.engine.busy():
            return self.engine.score(self._request(prompt, options), ids, logits=logits)

    def count_tokens(self, prompt: PromptInput, **options: Any) -> int:
        """Prompt tokens as ``reuse="off"`` would count them. Options: ``tools``, ``template_kwargs``."""
        request = self._request(prompt, {**options, "reuse": "off"})
        return self.engine.segment(request, Report())[0].num_tokens

    def render(self, prompt: PromptInput, **options: Any) -> str:
        """The prompt as the text that reaches the model. Options: ``tools``, ``template_kwargs``."""
        return self.engine.render(self._request(prompt, options)).text

    def json_processor(self, schema: Mapping[str, Any]) -> Any:
        """A logits processor for one request that keeps the answer within a JSON schema.

        Raises:
            MissingExtraError: llguidance is not installed. UsageError: not a usable schema.
        """
        from kvboost_rag.constrain import json_schema_processor

        spec, eos_ids = self.adapter.spec, sorted(self.engine.eos_ids)
        return json_schema_processor(self.adapter.tokenizer, schema, spec.vocab_size, eos_ids=eos_ids)

    def _request(self, prompt: PromptInput, options: Mapping[str, Any]) -> Request:
        return Request.build(prompt, reuse=self.reuse, repair=self.repair, options=options)


def _last(pieces: Iterator[Piece]) -> Result:
    result: Result | None = None
    for piece in pieces:
        result = piece.result or result
    assert result is not None, "the last piece carries the result"
    return result
