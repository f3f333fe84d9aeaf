"""How far two next-token distributions are apart."""

from __future__ import annotations

import torch


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full ‖ other)`` per row in nats; logits ``[n, vocab]`` both, result ``[n]``."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
