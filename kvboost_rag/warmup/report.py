"""What a warm-up did, and what it would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.warmup.source import InputProblem


@dataclass(slots=True)
class WarmReport:
    """The outcome of :func:`~kvboost_rag.warmup.job.warm`. Each distinct text counts once, in one of three fields.

    ``tokens`` counts chunk tokens of the blocks that were computed and stored (a chunk computed after two contexts
    counts twice), ``bytes`` their K and V as stored (about, where they are rounded; before zstd), ``seconds`` the whole
    job's wall time.
    """

    stored: int = 0  # chunks of which at least one block was computed, and all are in the store now
    skipped: int = 0  # chunks whose blocks were all there
    failed: int = 0  # chunks that could not be tokenised, computed or written
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    problems: list[InputProblem] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)  # suffix → files left out on purpose

    @property
    def chunks(self) -> int:
        """Chunks that were dealt with."""
        return self.stored + self.skipped + self.failed

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def ok(self) -> bool:
        """Whether everything that was asked for is in the store now."""
        return not (self.problems or self.failed or self.interrupted)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return {
            "chunks": self.chunks,
            "stored": self.stored,
            "skipped": self.skipped,
            "failed": self.failed,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "interrupted": self.interrupted,
            "problems": [problem.as_dict() for problem in self.problems],
            "ignored": self.ignored,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> WarmReport:
        """The report that :meth:`as_dict` came from. Raises KeyError or TypeError on anything else."""
        names = ("stored", "skipped", "failed", "tokens", "bytes", "seconds", "interrupted", "ignored")
        problems = [InputProblem(**problem) for problem in entry["problems"]]
        return cls(**{name: entry[name] for name in names}, problems=problems)

    @classmethod
    def merged(cls, reports: Iterable[WarmReport]) -> WarmReport:
        """One report of shards that ran side by side: counts add up, ``seconds`` is the longest, and a problem that
        several shards met (all read all inputs) is told once."""
        whole = cls()
        for report in reports:
            whole.stored += report.stored
            whole.skipped += report.skipped
            whole.failed += report.failed
            whole.tokens += report.tokens
            whole.bytes += report.bytes
            whole.seconds = max(whole.seconds, report.seconds)
            whole.interrupted |= report.interrupted
            whole.problems = list(dict.fromkeys([*whole.problems, *report.problems]))
            for kind, count in report.ignored.items():
                whole.ignored[kind] = max(count, whole.ignored.get(kind, 0))
        return whole


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What :func:`~kvboost_rag.warmup.plan.plan` found. ``tokens`` and ``bytes`` are of the blocks yet to be computed;
    ``estimate_s`` is None where there was no measurement."""

    chunks: int
    new_chunks: int
    already_stored: int
    tokens: int
    bytes: int
    estimate_s: float | None
    problems: tuple[InputProblem, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return {
            "chunks": self.chunks,
            "new_chunks": self.new_chunks,
            "already_stored": self.already_stored,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "estimate_s": self.estimate_s,
            "problems": [problem.as_dict() for problem in self.problems],
            "ignored": self.ignored,
        }
