"""Frozen settings: how much to repair, how to generate.

Every value is checked when the object is built, so that nothing below has to ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from typing import Literal, get_args

from kvboost_rag.errors import UnknownOptionError, UsageError

Reuse = Literal["chunks", "prefix", "off"]
REUSE_MODES: tuple[str, ...] = get_args(Reuse)


def unknown_option(what: str, given: object, known: tuple[str, ...]) -> UnknownOptionError:
    """An error that lists what there is and suggests the nearest."""
    near = get_close_matches(str(given), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownOptionError(f"unknown {what} {given!r}", hint=f"{hint}known: {', '.join(known)}")


def check_reuse(value: object) -> Reuse:
    """Validate a reuse mode."""
    if value not in REUSE_MODES:
        raise unknown_option("reuse mode", value, REUSE_MODES)
    return value  # type: ignore[return-value]


def _is_number(value: object) -> bool:
    """True and False are integers to Python, never to us."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise UsageError(f"{name} must be a share between 0 and 1, got {value!r}")


def _count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} must be a whole number of tokens, 0 or more, got {value!r}")


@dataclass(frozen=True, slots=True)
class Repair:
    """Which tokens of reused chunks are recomputed, at all layers, with an exact causal mask.

    Policies compose with ``|`` (the union of their tokens)::

        Repair.boundary(first=8) | Repair.attention(0.10)

    ``first``/``last``: tokens at each chunk's edges (LegoLink, EPIC 2410.15332). ``query``: share of the context with
    the most attention from the question over the late layers (FusionRAG 2601.12904, ProphetKV 2602.02579). ``blend``:
    share with the largest deviation of K at the check layer (CacheBlend 2405.16444, with an exact mask and the fresh
    K/V of the check layer kept). ``cap``: upper bound on the total share, boundary first, but no
    more than half of it where ``query`` and ``blend`` would not find their share. ``shift``: add the mean residual of
    recomputed keys to the keys that were not (helps blocks made without filler context). ``spread``: correct keys and
    values that were not recomputed by this share of a ridge regression over those that were.
    ``sample``: where something is spread, this share of the ``query`` tokens is an even sample of the context instead:
    tokens picked by attention are unlike those that they should speak for.
    """

    first: int = 0
    last: int = 0
    query: float = 0.0
    blend: float = 0.0
    cap: float = 1.0
    everything: bool = False
    shift: bool = False
    spread: float = 0.0
    sample: float = 0.4
    name: str = ""

    def __post_init__(self) -> None:
        _count("first", self.first)
        _count("last", self.last)
        for name in ("query", "blend", "cap", "spread", "sample"):
            _share(name, getattr(self, name))

    @classmethod
    def none(cls) -> Repair:
        """Nothing is recomputed: only glue, misses and the question are forwarded."""
        return cls(name="none")

    @classmethod
    def full(cls) -> Repair:
        """Everything is recomputed: equals a full prefill over the same span tokens."""
        return cls(everything=True, name="full")

    @classmethod
    def boundary(cls, first: int = 8, last: int = 0) -> Repair:
        """The first and last tokens of every chunk."""
        return cls(first=first, last=last)

    @classmethod
    def attention(cls, share: float) -> Repair:
        """The ``share`` of context tokens that the question attends to most."""
        return cls(query=share)

    @classmethod
    def deviation(cls, share: float) -> Repair:
        """CacheBlend's choice: the ``share`` of context tokens whose early-layer keys deviate most."""
        return cls(blend=share)

    def __or__(self, other: Repair) -> Repair:
        if not isinstance(other, Repair):
            return NotImplemented
        return Repair(
            first=max(self.first, other.first),
            last=max(self.last, other.last),
            query=max(self.query, other.query),
            blend=max(self.blend, other.blend),
            cap=min(self.cap, other.cap),
            everything=self.everything or other.everything,
            shift=self.shift or other.shift,
            spread=max(self.spread, other.spread),
            sample=max(r.sample for r in (self, other) if r.spread or not (self.spread or other.spread)),
        )

    def with_shift(self, shift: bool = True) -> Repair:
        """The same policy with (or without) the key shift."""
        return replace(self, shift=shift, name="")

    def with_spread(self, spread: float = 0.75) -> Repair:
        """The same policy with (or, at 0, without) the regression that corrects what is not recomputed."""
        return replace(self, spread=spread, name="")

    @property
    def label(self) -> str:
        """A stable description for reports: the name, or what it does."""
        return self.name or self.recipe

    @property
    def recipe(self) -> str:
        """What it does, whatever its name: keeps KV of different policies apart."""
        if self.everything:
            return "full"
        parts = [f"first={self.first}", f"last={self.last}", f"query={self.query:g}", f"blend={self.blend:g}"]
        parts += [f"cap={self.cap:g}", *(["shift"] if self.shift else [])]
        parts += [f"spread={self.spread:g}", f"sample={self.sample:g}"] if self.spread else []
        return ",".join(parts)

    @property
    def is_none(self) -> bool:
        """Whether no token of a reused chunk is recomputed."""
        return not self.everything and not (self.first or self.last or self.query or self.blend)


NAMED_REPAIRS: dict[str, Repair] = {
    "fast": Repair(name="fast"),
    "balanced": Repair(first=8, query=0.13, cap=0.13, spread=0.75, name="balanced"),
    "faithful": Repair(first=8, query=0.30, cap=0.30, spread=0.75, sample=0.5, name="faithful"),
}


def resolve_repair(value: str | Repair) -> Repair:
    """A named point (``"fast"``, ``"balanced"``, ``"faithful"``) or a :class:`Repair` value."""
    if isinstance(value, Repair):
        return value
    if not isinstance(value, str) or value not in NAMED_REPAIRS:
        raise unknown_option("repair policy", value, (*NAMED_REPAIRS, "a Repair(...) value"))
    return NAMED_REPAIRS[value]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. ``temperature=0`` is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < inf:
            raise UsageError(f"temperature must be 0 or more, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        _count("top_k", self.top_k)
        if not _is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < inf:
            raise UsageError(f"repetition_penalty must be above 0, got {self.repetition_penalty!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise UsageError(f"seed must be a whole number, got {self.seed!r}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise UsageError(f"seed must have at most 64 bits, got {self.seed!r}")
