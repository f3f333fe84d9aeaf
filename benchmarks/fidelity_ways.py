"""How a row of the fidelity table is run on one item: by the engine itself, or by a rival's method over the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from fidelity_data import Item, messages
from fidelity_policies import Row, is_made
from rival_prompt import Laid

from kvboost_rag import KVBoost


class Way(Protocol):
    """One row on one item: what it cost until the first token, and what it says."""

    forwarded: float
    repaired_share: float
    ttft_s: float

    def logits(self, answer: Sequence[int]) -> torch.Tensor:
        """Teacher-forced, ``[len(answer), vocab]``."""
        ...

    def text(self, max_new_tokens: int) -> str:
        """The free greedy answer."""
        ...


class EngineWay:
    """The engine's own way; costs are those of the last :meth:`logits`."""

    def __init__(self, engine: KVBoost, row: Row, item: Item, style: str) -> None:
        self._engine = engine
        self._prompt = messages(item, passages=row.passages, style=style)
        self._options: dict[str, Any] = {"reuse": row.reuse, "repair": row.repair}
        if row.passages:
            self._options["chunks"] = list(item.passages)
        self._made = is_made(row.variant)

    def logits(self, answer: Sequence[int]) -> torch.Tensor:
        score = self._engine.score(self._prompt, list(answer), logits=True, **self._options)
        assert score.logits is not None
        report = score.report
        assert not (self._made and report.misses), "a rival's block must serve"
        context = sum(c.num_tokens for c in report.chunks)
        self.forwarded, self.ttft_s = report.forwarded_tokens, report.ttft_s
        self.repaired_share = report.repaired_tokens / context if context else 0.0
        return score.logits

    def text(self, max_new_tokens: int) -> str:
        return self._engine.generate(self._prompt, max_new_tokens=max_new_tokens, **self._options).text


class RivalWay:
    """A rival's way over a laid prompt."""

    def __init__(self, laid: Laid) -> None:
        self._laid = laid
        self.forwarded, self.repaired_share, self.ttft_s = laid.forwarded, laid.repaired_share, laid.ttft_s

    def logits(self, answer: Sequence[int]) -> torch.Tensor:
        return self._laid.along(answer).cpu()

    def text(self, max_new_tokens: int) -> str:
        ids = self._laid.greedy(max_new_tokens)
        engine = self._laid.engine
        return engine.tokens.decode([i for i in ids if i not in engine.engine.eos_ids])


def nll(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Mean negative log-likelihood per token, in nats."""
    ids = torch.tensor(list(token_ids))[:, None]
    return float(-logits.log_softmax(-1).gather(1, ids).mean())
