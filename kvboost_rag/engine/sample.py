"""Choose the next token: transformers' own logits processors behind one call."""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.config import Sampling

COLDEST = 1e-6  # below, logits overflow; the largest has all the probability long before
LogitsHook = Any  # a transformers LogitsProcessor: (input_ids [1, n], scores [1, vocab]) -> scores


class Sampler:
    """Greedy at temperature 0, else temperature, top-k and top-p from transformers. ``hooks`` are extra logits
    processors (constrained decoding), run first."""

    def __init__(self, sampling: Sampling, device: torch.device, hooks: list[LogitsHook] | None = None) -> None:
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.greedy = sampling.temperature == 0
        self.processors = LogitsProcessorList(hooks or [])
        if sampling.repetition_penalty != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self.greedy:
            self.processors.append(TemperatureLogitsWarper(max(COLDEST, float(sampling.temperature))))
            if sampling.top_k:
                self.processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self.processors.append(TopPLogitsWarper(float(sampling.top_p)))
        self.generator: torch.Generator | None = None
        if not self.greedy:
            self.generator = torch.Generator(device=device)
            if sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(sampling.seed)

    def next(self, token_ids: torch.Tensor, logits: torch.Tensor) -> int:
        """``token_ids [n]`` so far (prompt included), ``logits [1, vocab]`` → one id."""
        scores = logits.float()
        if len(self.processors):
            scores = self.processors(token_ids[None], scores.clone())
        if self.greedy:
            return int(scores[0].argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
