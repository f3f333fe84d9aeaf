"""The rows of the fidelity table: how blocks are computed, and what is recomputed of them.

Each row names a *variant* (engine options: what blocks are computed after) and a repair. Rows of the same variant share
one engine and its blocks, so every row is measured on the same items in one run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvboost_rag import Repair


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. ``reuse="off"`` rows prefill plainly; ``passages=False`` leaves the documents out."""

    name: str
    variant: str = "canonical"
    repair: str | Repair = "fast"
    reuse: str = "chunks"
    passages: bool = True
    about: str = ""


VARIANTS: dict[str, dict[str, Any]] = {
    "canonical": {},  # the default: head and filler
    "head": {"filler_tokens": 0},
    "alone": {"alone": True},
    "bf16": {},  # the noise floor: the same model in bfloat16
}

ROWS: tuple[Row, ...] = (
    Row("no-context", reuse="off", passages=False, about="the question without documents"),
    Row("plain", reuse="off", about="full prefill, prompt tokenised as a whole"),
    Row("full-bf16", "bf16", Repair.full(), about="full prefill in bfloat16: the noise floor"),
    Row("alone", "alone", "fast", about="blocks computed alone, rotated into place, nothing recomputed (naive)"),
    Row("head", "head", "fast", about="blocks computed after a neutral head, nothing recomputed"),
    Row("cacheblend-15", "alone", Repair.deviation(0.15), about="CacheBlend 15 %, exact mask (2405.16444)"),
    Row("legolink-16", "alone", Repair.boundary(16), about="LegoLink, first 16 of each chunk (2410.15332)"),
    Row("fast", repair="fast", about="blocks after the canonical context, nothing recomputed"),
    Row("balanced", repair="balanced", about="the default: at most 13 % recomputed"),
    Row("faithful", repair="faithful", about="at most 30 % recomputed"),
)
BY_NAME = {row.name: row for row in ROWS}
DEFAULT = "no-context,plain,alone,head,cacheblend-15,legolink-16,fast,balanced,faithful"


def rows(names: str) -> list[Row]:
    """Rows by comma-separated names; ``first=8+query=0.1@head`` builds one on the spot (variant after ``@``).

    Raises:
        SystemExit: an unknown name.
    """
    return [BY_NAME[name] if name in BY_NAME else _custom(name) for name in names.split(",") if name]


def _custom(name: str) -> Row:
    spec, _, variant = name.partition("@")
    try:
        pairs = dict(part.split("=") for part in spec.split("+"))
        values: dict[str, Any] = {k: int(v) if k in ("first", "last") else float(v) for k, v in pairs.items()}
        return Row(name, variant or "canonical", Repair(**values), about="custom")
    except (ValueError, TypeError) as error:
        known = ", ".join(BY_NAME)
        raise SystemExit(f"unknown policy {name!r} ({error}); known: {known}, or first=8+query=0.1@head") from error


@dataclass(slots=True)
class Outcome:
    """What one row gave on one item. Distributions are compared with full prefill's over the same span tokens."""

    kl_first: float = 0.0
    kl_greedy: float = 0.0  # mean over full prefill's own greedy answer, teacher-forced
    kl_gold: float = 0.0  # mean over the gold answer
    agreement: float = 0.0  # argmax, over the greedy answer
    same_text: float = 0.0
    nll_gold: float = 0.0  # mean per token
    d_nll: float = 0.0  # |NLL gold - full prefill's|
    f1: float = 0.0
    exact: float = 0.0
    forwarded: float = 0.0  # tokens, as counted where the model is called
    repaired_share: float = 0.0  # of the context
    ttft_s: float = 0.0
    text: str = field(default="")
