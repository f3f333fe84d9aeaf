"""The rows of the fidelity table: how blocks are computed, and what is recomputed of them.

Each row names a *variant* (engine options: what blocks are computed after) and a repair. Rows of the same variant share
one engine and its blocks, so every row is measured on the same items in one run. Rivals that the engine does not offer have
blocks of their own (``rival_blocks.py``) or a *method* of their own (``rival_ape.py``, ``rival_shift.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rival_ape import Ape
from rival_prompt import Method
from rival_shift import AgentKVShift

from kvboost_rag import Repair


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. ``reuse="off"`` rows prefill plainly; ``passages=False`` leaves the documents out; a ``method`` stands in
    place of the engine's own compose, repair and decode."""

    name: str
    variant: str = "canonical"
    repair: str | Repair = "fast"
    reuse: str = "chunks"
    passages: bool = True
    about: str = ""
    method: Method | None = None


VARIANTS: dict[str, dict[str, Any]] = {
    "canonical": {},  # the default: head and filler
    "head": {"filler_tokens": 0},
    "alone": {"alone": True},
    "bf16": {},  # the noise floor: the same model in bfloat16
}
MADE = ("own-head", "dummies", "kamera")  # variants whose blocks rival_blocks.py makes, by how their names start


def is_made(variant: str) -> bool:
    """Whether a variant's blocks are made by ``rival_blocks.py``."""
    return variant.startswith(MADE)


def engine_options(variant: str) -> dict[str, Any]:
    """Options of the engine that serves a variant."""
    return {"alone": True} if is_made(variant) else VARIANTS[variant]


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

APE = "APE 2502.05431, blocks after the prompt's head"
KAMERA = "Kamera's patch (abstract of 2606.23581 alone) measured"
SHIFT = "AgentKVShift (2607.21604):"
RIVALS: tuple[Row, ...] = (
    Row("legolink-0", "dummies", about="LegoLink-0 (2410.15332): blocks after 4 dummy tokens, nothing recomputed"),
    Row("own-head", "own-head", about="blocks after the prompt's own head, nothing recomputed (APE with T = S = 1)"),
    Row("ape", "own-head", method=Ape(), about=f"{APE}: T = S = 0.9 (the authors' demo), our positions"),
    Row("ape-shared", "own-head", method=Ape(shared=True), about=f"{APE}: T = S = 0.9, shared positions (the paper's)"),
    Row("ape-tuned", "own-head", method=Ape(1.0, 0.9), about=f"{APE}: T = 1, S = 0.9 (tuned), our positions"),
    Row(
        "ape-shared-tuned",
        "own-head",
        method=Ape(0.9, 1.0, shared=True),
        about=f"{APE}: T = 0.9, S = 1 (tuned), shared positions",
    ),
    Row(
        "psr",
        "own-head",
        method=Ape(1.0, 0.9, first=16),
        about="PSR (abstract of 2603.20218 alone): prefix, scale (ape-tuned), first 16 of each chunk recomputed",
    ),
    Row("kamera-4", "kamera-4", about=f"{KAMERA} behind another question's passages, rank 4"),
    Row("kamera-16", "kamera-16", about=f"{KAMERA} behind another question's passages, rank 16"),
    Row("kamera-full", "kamera-full", about=f"{KAMERA} behind another question's passages, not cut"),
    Row("kamera-4-own", "kamera-4-own", about=f"{KAMERA} in the request's own context (an oracle), rank 4"),
    Row("kamera-16-own", "kamera-16-own", about=f"{KAMERA} in the request's own context (an oracle), rank 16"),
    Row("kvshift-15", "alone", method=AgentKVShift(0.15), about=f"{SHIFT} probes 15 % of each chunk, blocks alone"),
    Row("kvshift-30", "alone", method=AgentKVShift(0.30), about=f"{SHIFT} probes 30 % of each chunk, blocks alone"),
    Row("kvshift-15-ours", method=AgentKVShift(0.15), about=f"{SHIFT} probes 15 % of each chunk, our blocks"),
    Row("kvshift-30-ours", method=AgentKVShift(0.30), about=f"{SHIFT} probes 30 % of each chunk, our blocks"),
)
ROWS = (*ROWS, *RIVALS)
BY_NAME = {row.name: row for row in ROWS}
DEFAULT = "no-context,plain,alone,head,cacheblend-15,legolink-16,fast,balanced,faithful"


def rows(names: str) -> list[Row]:
    """Rows by comma-separated names; ``first=8+query=0.1@head`` builds one on the spot (variant after ``@``), and so do
    ``ape:0.9:1.0`` (temperature, scale; after ``@`` the blocks, the prompt's own head if none) and ``ape-shared:0.9:1.0``.

    Raises:
        SystemExit: an unknown name.
    """
    return [BY_NAME[name] if name in BY_NAME else _custom(name) for name in names.split(",") if name]


def _ape(name: str) -> Row:
    spec, _, variant = name.partition("@")
    kind, *values = spec.split(":")
    try:
        temperature, scale, *first = (float(v) for v in values)
        method = Ape(temperature, scale, shared=kind == "ape-shared", first=int(first[0]) if first else 0)
    except ValueError as error:
        raise SystemExit(f"unknown policy {name!r}: give ape:TEMPERATURE:SCALE[:FIRST]") from error
    return Row(name, variant or "own-head", method=method, about="custom")


def _custom(name: str) -> Row:
    if name.startswith(("ape:", "ape-shared:")):
        return _ape(name)
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
