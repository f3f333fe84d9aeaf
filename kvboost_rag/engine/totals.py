"""What an engine's requests come to, added up since it was made: for dashboards, not for judging one answer."""

from __future__ import annotations

import threading
from collections import Counter

from kvboost_rag.engine.report import Report

TOKENS = ("prompt_tokens", "reused_tokens", "repaired_tokens", "forwarded_tokens", "stored_tokens", "new_tokens")


class Totals:
    """Sums over reports. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = dict.fromkeys(TOKENS, 0)
        self._finished: Counter[str] = Counter()
        self._chunks: Counter[tuple[str, str]] = Counter()  # (outcome, reason of a miss)
        self._seconds = {"ttft_s": 0.0, "total_s": 0.0}

    def prefilled(self, report: Report) -> None:
        """Count a prompt, answered or only scored."""
        with self._lock:
            for name in TOKENS[:4]:
                self._sums[name] += getattr(report, name)
            for chunk in report.chunks:
                reason = chunk.reason.partition(":")[0] if chunk.outcome == "miss" else ""
                self._chunks[chunk.outcome, reason] += 1

    def answered(self, report: Report, reason: str) -> None:
        """Count an answer that came to its end; ``reason`` is its finish reason."""
        with self._lock:
            self._finished[reason] += 1
            for name in TOKENS[4:]:
                self._sums[name] += getattr(report, name)
            for name in self._seconds:
                self._seconds[name] += getattr(report, name)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict. ``requests`` counts answers by finish reason, ``chunks`` by outcome; of missed chunks
        by reason there is ``misses``. Seconds are sums over the answers."""
        with self._lock:
            outcomes: Counter[str] = Counter()
            for (outcome, _), count in self._chunks.items():
                outcomes[outcome] += count
            misses = {reason: count for (outcome, reason), count in self._chunks.items() if outcome == "miss"}
            return {
                "requests": dict(self._finished),
                **{name: self._sums[name] for name in TOKENS},
                "chunks": dict(outcomes),
                "misses": misses,
                **self._seconds,
            }
