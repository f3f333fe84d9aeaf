"""What the fidelity harness measures, and how sure it is: KL, agreement, F1, gap recovered, paired bootstrap."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import torch

SAMPLES = 2000


def kl(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full ‖ other)`` in nats per row; logits ``[n, vocab]`` both."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def agreement(full: torch.Tensor, other: torch.Tensor) -> float:
    """Share of rows whose most likely token is the same."""
    return float((full.argmax(-1) == other.argmax(-1)).float().mean())


def normalise(text: str) -> list[str]:
    """SQuAD's words: lower case, no punctuation, no articles."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(text: str, answers: Sequence[str]) -> float:
    """Best word F1 of ``text`` against the accepted answers."""
    return max((_f1(normalise(text), normalise(a)) for a in answers), default=0.0)


def _f1(given: list[str], gold: list[str]) -> float:
    common = sum((Counter(given) & Counter(gold)).values())
    if not common:
        return float(given == gold)
    precision, recall = common / len(given), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 if an accepted answer is the whole text, normalised."""
    return float(any(normalise(text) == normalise(a) for a in answers))


def gap_recovered(none: float, method: float, full: float) -> float | None:
    """``(none - method) / (none - full)`` of a mean; None where there is no gap to close. May exceed 1: judge by KL."""
    return (none - method) / (none - full) if abs(none - full) > 1e-9 else None


def bootstrap(values: Sequence[float], *, seed: int = 0, samples: int = SAMPLES) -> tuple[float, float, float]:
    """Mean with a 95 % percentile interval over items."""
    if not values:
        raise ValueError("no values to average")
    draw = random.Random(seed)
    n = len(values)
    means = sorted(fmean(draw.choices(values, k=n)) for _ in range(samples))
    return fmean(values), means[int(0.025 * samples)], means[int(0.975 * samples) - 1]


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, samples: int = SAMPLES
) -> tuple[float, float, float]:
    """Mean of ``a - b`` over the same items, with a 95 % interval: 0 outside of it is a difference."""
    if len(a) != len(b):
        raise ValueError(f"paired values need the same items: {len(a)} against {len(b)}")
    return bootstrap([x - y for x, y in zip(a, b, strict=True)], seed=seed, samples=samples)
