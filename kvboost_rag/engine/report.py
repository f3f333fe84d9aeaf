"""What happened to a request: per chunk hit or miss and why, token counts, seconds by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost_rag.model.cache import CacheCounts


@dataclass(slots=True)
class ChunkReport:
    """One chunk span of the prompt.

    ``outcome`` is ``"hit"`` (a stored block was composed), ``"prefix"`` (it stood in a held prefix), ``"miss"``
    (forwarded in place). ``reason`` says why a miss was a miss, or which block a hit used.
    """

    start: int
    end: int
    outcome: str
    reason: str = ""
    repaired_tokens: int = 0
    text: str = ""  # first characters, for humans

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Report:
    """Counts are prompt tokens. ``forwarded_tokens`` is counted where the model is called: every row at every layer
    that it ran, scoring passes included (a pass over part of the layers counts in proportion)."""

    reuse: str = "chunks"
    repair: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0  # neither forwarded nor repaired: taken from blocks or a held prefix as they are
    repaired_tokens: int = 0
    prefix_tokens: int = 0  # of the reused: from an exact (or tagged) held prefix
    prefix_exact: bool = True
    exact: bool = True  # the answer's KV equals a full prefill over the same tokens
    forwarded_tokens: float = 0.0
    scoring_tokens: float = 0.0  # of the forwarded: spent on choosing what to repair
    vain_tokens: float = 0.0  # of the forwarded: thrown away, because a block was lost on its way
    stored_tokens: int = 0  # misses encoded and stored after the answer
    new_tokens: int = 0
    host_tokens: int = 0  # positions whose KV lies in host memory at the end (kv_vram=)
    spilled_pages: int = 0  # that moved there while this request ran
    host_attended_tokens: int = 0  # positions that the CPU attended to, summed over decoded tokens
    ttft_s: float = 0.0
    total_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)  # seconds
    chunks: list[ChunkReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    repaired_positions: list[int] = field(default_factory=list)  # not part of as_dict
    _inner_s: float = field(default=0.0, repr=False, compare=False)  # of stages inside the present one

    @property
    def hits(self) -> int:
        """Chunks that were not prefilled."""
        return sum(c.outcome in ("hit", "prefix") for c in self.chunks)

    @property
    def misses(self) -> int:
        """Chunks that were forwarded."""
        return sum(c.outcome == "miss" for c in self.chunks)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        own = asdict(self)
        del own["repaired_positions"], own["_inner_s"]
        return {**own, "hits": self.hits, "misses": self.misses}

    def plot(self, path: str | None = None) -> Any:
        """The prompt as coloured spans: a matplotlib figure, saved to ``path`` (PNG or SVG) if given."""
        from kvboost_rag.engine.picture import report_plot

        return report_plot(self, path)

    def _repr_html_(self) -> str:
        from kvboost_rag.engine.picture import report_html

        return report_html(self)

    def note_cache(self, counts: CacheCounts) -> None:
        """Where the KV lay in the end."""
        self.host_tokens, self.spilled_pages = counts.host_tokens, counts.spilled_pages
        self.host_attended_tokens = counts.host_attended_tokens

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of a ``with`` block to ``stages[name]``, less those of stages inside it."""
        outer, self._inner_s = self._inner_s, 0.0
        started = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - started
            self.stages[name] = self.stages.get(name, 0.0) + took - self._inner_s
            self._inner_s = outer + took

    def table(self) -> str:
        """A plain-text table for people."""
        n = max(1, self.prompt_tokens)
        lines = [f"{'chunk':>5} {'tokens':>13} {'outcome':8} {'repaired':>8}  why"]
        for i, c in enumerate(self.chunks):
            where = f"[{c.start}, {c.end})"
            lines.append(f"{i:>5} {where:>13} {c.outcome:8} {c.repaired_tokens:>8}  {c.reason}")
        lines.append(
            f"prompt {self.prompt_tokens} tokens: reused {self.reused_tokens} ({self.reused_tokens / n:.0%}), "
            f"repaired {self.repaired_tokens}, forwarded {self.forwarded_tokens:.0f} ({self.forwarded_tokens / n:.0%})"
        )
        lines.append(f"reuse={self.reuse} repair={self.repair} {'exact' if self.exact else 'approximate'}")
        if self.host_tokens:
            lines.append(f"KV of {self.host_tokens} tokens in host memory, {self.spilled_pages} pages moved there")
        stages = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in self.stages.items())
        lines.append(f"first token after {1e3 * self.ttft_s:.0f} ms ({stages}); {self.new_tokens} new tokens")
        lines += [f"warning: {w}" for w in self.warnings]
        return "\n".join(lines)
