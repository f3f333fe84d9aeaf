"""Where the pages of one request lie.

::

    positions:  0 ........................ h*page ..................... length
    pages:      | host segments (and disk)       | slots of the device's pool |

Pages leave the device oldest first and never come back for good, so one number says it all: how many are on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvboost_rag.model.paged.host import Segment


@dataclass(slots=True)
class PageTable:
    """``host_pages`` leading pages lie in ``segments``, the following ones in ``slots``, in order."""

    page_tokens: int
    segment_tokens: int
    host_pages: int = 0
    segments: list[Segment] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

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
        slots = self.slots
        return not self.host_pages and all(b - a == 1 for a, b in pairwise(slots))

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
        a = max(start, self.host_tokens)
        end = min(end, self.num_pages * self.page_tokens)
        while a < end:
            index = (a - self.host_tokens) // self.page_tokens
            place = self.slots[index] * self.page_tokens + a % self.page_tokens
            last = index
            while last + 1 < len(self.slots) and self.slots[last + 1] == self.slots[last] + 1:
                last += 1
            b = min(end, self.host_tokens + (last + 1) * self.page_tokens)
            yield a, b, place
            a = b
