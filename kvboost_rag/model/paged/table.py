"""Where the pages of one request lie.

::

    positions:  0 ........................ h*page ..................... length
    pages:      | host segments (and disk)       | slots of the device's pool |

Pages leave the device oldest first and never come back for good, so one number says it all: how many are on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvboost_rag.model.paged.host import Segment


@dataclass(slots=True)
class PageTable:
    """``host_pages`` leading pages lie in ``segments``, the following ones in ``slots``, in order."""

    page_tokens: int
    segment_tokens: int
    host_pages: int = 0
    segments: list[Segment] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    _runs: list[tuple[int, int, int]] | None = None  # (position, end, place) of slots side by side

    def changed(self) -> None:
        """Whoever moves pages says so."""
        self._runs = None

    @property
    def num_pages(self) -> int:
        return self.host_pages + len(self.slots)

    @property
    def host_tokens(self) -> int:
        """Positions ``[0, host_tokens)`` belong to the host."""
        return self.host_pages * self.page_tokens

    @property
    def in_one_run(self) -> bool:
        """Everything lies on the device, in order, side by side."""
        return not self.host_pages and len(self._device_runs()) <= 1

    def host_pieces(self, start: int, end: int) -> Iterator[tuple[int, int, Segment, int]]:
        """Positions ``[a, b)`` of ``[start, end)`` on the host, with their segment and place in it, in order."""
        a, end = start, min(end, self.host_tokens)
        while a < end:
            index, offset = divmod(a, self.segment_tokens)
            b = min(end, a - offset + self.segment_tokens)
            yield a, b, self.segments[index], offset
            a = b

    def device_pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Positions ``[a, b)`` of ``[start, end)`` on the device, with their place in the pool, in order; slots side by
        side are one piece."""
        for a, b, place in self._device_runs():
            first, last = max(a, start), min(b, end)
            if first < last:
                yield first, last, place + first - a

    def _device_runs(self) -> list[tuple[int, int, int]]:
        if self._runs is None:
            size, a = self.page_tokens, self.host_tokens
            runs: list[tuple[int, int, int]] = []
            for slot in self.slots:
                if runs and runs[-1][2] + a - runs[-1][0] == slot * size:
                    runs[-1] = (runs[-1][0], a + size, runs[-1][2])
                else:
                    runs.append((a, a + size, slot * size))
                a += size
            self._runs = runs
        return self._runs
