"""Plain prefill with the model's own attention and cache: ``reuse="off"`` on architectures without reuse."""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.chunk import Prompt
from kvboost_rag.engine.decode import Step
from kvboost_rag.engine.prefill import Prepared
from kvboost_rag.engine.report import Report
from kvboost_rag.model.adapter import ModelAdapter


def plain_prefill(adapter: ModelAdapter, prompt: Prompt, report: Report) -> tuple[Prepared, Step]:
    """Run the whole prompt through the model as transformers would; the step goes on from there."""
    device = adapter.spec.device
    with report.stage("forward"):
        logits, cache = adapter.plain_forward(torch.tensor(prompt.token_ids, device=device), None, 0)
    report.prompt_tokens = prompt.num_tokens
    report.forwarded_tokens = float(prompt.num_tokens)
    held: dict[str, Any] = {"cache": cache}
    said = list(prompt.token_ids)

    def step(token_id: int, position: int) -> torch.Tensor:
        said.append(token_id)
        if position == adapter.support.rope_switch:  # from here on another rotary table: everything anew
            next_logits, held["cache"] = adapter.plain_forward(torch.tensor(said, device=device), None, 0)
        else:
            one = torch.tensor([token_id], device=device)
            next_logits, held["cache"] = adapter.plain_forward(one, held["cache"], position)
        return next_logits

    prepared = Prepared(prompt, adapter.new_cache(0), logits, prompt.num_tokens, plain_cache=cache)
    return prepared, step
