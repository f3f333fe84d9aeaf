"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvboost_rag.engine.report import Report


@dataclass(frozen=True, slots=True)
class Result:
    """An answer. ``token_ids`` are the new ids, an end-of-sequence id included; ``text`` has neither it nor the stop
    string. ``finish_reason`` is ``"stop"``, ``"length"`` or ``"cancelled"``."""

    text: str
    token_ids: list[int]
    finish_reason: str
    report: Report

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.text)}</p>{self.report._repr_html_()}"

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "report": self.report.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer; the last one carries the whole result."""

    text: str
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a continuation under the same reuse path as ``generate``.

    ``logprobs [num_tokens]``; ``logits [num_tokens, vocab]`` only on request.
    """

    token_ids: list[int]
    logprobs: torch.Tensor
    report: Report
    logits: torch.Tensor | None = field(default=None)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token, in nats."""
        return float(-self.logprobs.mean())
