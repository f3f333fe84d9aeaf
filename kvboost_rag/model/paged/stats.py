"""What paging did: counted where it happens."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class PagedStats:
    """Counters since loading; sizes in bytes.

    ``spilled_pages`` were moved from the device to the host, ``placed_pages`` began there (a long prompt's first ones).
    ``bytes_out`` left the device, ``bytes_in`` came back for forwards over many rows. ``host_attended_tokens``:
    positions that the CPU attended to, per decoded token; ``streamed_tokens``: positions that came back, per forward;
    ``prefetched_layers``: layers whose first segment was on its way before they began.
    """

    pages: int
    page_tokens: int
    device_bytes: int
    pinned: str = ""  # how host memory was page-locked, last time
    free_pages: int = 0
    host_bytes: int = 0  # taken now
    disk_bytes: int = 0
    spilled_pages: int = 0
    placed_pages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    host_attended_tokens: int = 0
    streamed_tokens: int = 0
    prefetched_layers: int = 0

    def as_dict(self) -> dict[str, object]:
        """For reports."""
        return asdict(self)
