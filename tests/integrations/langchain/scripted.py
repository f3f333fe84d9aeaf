"""A real engine over a tiny random model whose answers are written down: a logits processor forces their tokens.

Everything but the choice of the token is real: rendering, matching, reuse, grammar masks, stop strings, reports.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor

from kvboost_rag import KVBoost, Piece
from tests.tiny import tiny_model, tiny_tokenizer

Script = Callable[[Any, dict[str, Any]], str]


class Forced(LogitsProcessor):
    """Lets through one written answer, then the end of the turn."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.ids[min(self.step, len(self.ids) - 1)]
        self.step += 1
        assert torch.isfinite(scores[0, wanted]), f"the grammar forbids the written answer at token {self.step}"
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([wanted]), 0.0)


class ScriptedKVBoost(KVBoost):
    """``script(prompt, options)`` gives the answer to a prompt; ``asked`` keeps the prompts, ``options`` the options."""

    def __init__(self, script: Script, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.script = script
        self.asked: list[Any] = []
        self.options: list[dict[str, Any]] = []

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        return super().stream(prompt, **self._scripted(prompt, options))

    async def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Piece]:
        async for piece in super().astream(prompt, **self._scripted(prompt, options)):
            yield piece

    def _scripted(self, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(prompt)
        self.options.append(options)
        ids = self.tokenizer(self.script(prompt, options), add_special_tokens=False)["input_ids"]
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        hooks = [*(options.get("logits_processors") or ()), Forced([*ids, end])]
        return {**options, "logits_processors": hooks}


@lru_cache(maxsize=1)
def _model() -> Any:
    return tiny_model("llama")


def scripted_engine(script: Script | str, *, tokenizer: Any = None, **options: Any) -> ScriptedKVBoost:
    """A scripted engine in memory; a string is the answer to everything."""
    written = script if callable(script) else lambda prompt, given: script
    settings = {"store": "memory", "filler_tokens": 32, "name": "scripted", **options}
    return ScriptedKVBoost(written, _model(), tokenizer or tiny_tokenizer(), **settings)


def last_text(prompt: Any) -> str:
    """What the user said last (of messages), or the prompt."""
    if isinstance(prompt, str):
        return prompt
    return str(next(m["content"] for m in reversed(prompt) if m["role"] == "user"))
