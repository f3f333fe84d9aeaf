"""What streaming did: counted, not computed from a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class StreamStats:
    """Counters since loading. Seconds come from events that have happened; nothing waits for them.

    ``probed_gb_per_s`` is what one copy reached while loading, before anything ran (None: not measured).
    ``late_fetches`` are copies that were started only when the layer was due: none in a steady run; a forward that
    was left early costs up to one per slot.
    """

    resident_layers: int
    streamed_layers: int
    slots: int
    pinned: str = ""
    probed_gb_per_s: float | None = None
    layers_run: int = 0  # streamed layers that were computed
    copies: int = 0
    bytes_copied: int = 0
    late_fetches: int = 0
    timed_bytes: int = 0
    copy_s: float = 0.0
    stall_s: float = 0.0

    @property
    def gb_per_s(self) -> float | None:
        """Achieved rate of the copies that were timed, in 1e9 bytes/s."""
        return self.timed_bytes / self.copy_s / 1e9 if self.copy_s > 0 else None

    def as_dict(self) -> dict[str, object]:
        """For reports."""
        return {**asdict(self), "gb_per_s": self.gb_per_s}
