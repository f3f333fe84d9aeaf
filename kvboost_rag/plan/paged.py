"""How a budget of GPU memory for KV is divided into pages, and what lies where beyond it.

A page is ``page_tokens`` positions of one request at **all** layers. A request grows and spills by positions, so all
layers of a position always lie in the same tier: one page table per request instead of one per layer, one copy per
spilled page (16.8 MB for a 32B model), and every layer meets the same split between device and host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.plan.memory import gib, parse_bytes

FEWEST_PAGES = 2  # one is written, one is free for the next position
OUT_SLOTS = 2  # pages on their way to the host
IN_SLOTS = 2  # segments of one layer on their way back
SEGMENT_BYTES = 256 << 20  # host memory is taken in pieces of about this size
IN_SHARE = 8  # the way back takes at most this part of the budget


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What the KV of all live requests may take. Sizes in bytes (or text such as ``"2GiB"`` for ``vram``).

    ``host``: host memory for what is spilled (None: as much as the machine has). ``disk``: a folder for what goes
    beyond that (None: refuse instead); its files have no name and vanish with the process.
    """

    vram: int | str
    page_tokens: int = 64
    host: int | None = None
    disk: str | Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "vram", parse_bytes(self.vram))
        if self.page_tokens < 1:
            raise UsageError(f"page_tokens={self.page_tokens}", hint="for example 64")
        if self.host is not None and self.host < 0:
            raise UsageError(f"host={self.host} is no amount of memory", hint="bytes, or None for all there is")
        if self.disk is not None and not Path(self.disk).is_dir():
            raise UsageError(f"disk={str(self.disk)!r} is no folder", hint="a folder on a fast local disk")

    @property
    def nbytes(self) -> int:
        """The device's share, in bytes."""
        return int(self.vram)


def kv_budget(value: str | int | KVBudget) -> KVBudget:
    """``"2GiB"``, bytes, or a whole :class:`KVBudget`. Raises UsageError."""
    return value if isinstance(value, KVBudget) else KVBudget(value)


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The division of a budget. ``segment_tokens`` (a multiple of ``page_tokens``): the unit of host memory, and of
    the copies of one layer back to the device."""

    page_tokens: int
    page_bytes: int
    pages: int
    segment_tokens: int
    segment_bytes: int  # all layers
    segment_layer_bytes: int

    @property
    def device_bytes(self) -> int:
        """Pages and both ways' buffers: never more than the budget."""
        return (self.pages + OUT_SLOTS) * self.page_bytes + IN_SLOTS * self.segment_layer_bytes


def page_sizes(budget: KVBudget, token_bytes: int, num_layers: int) -> PageSizes:
    """Divide ``budget``, where one position takes ``token_bytes`` at all layers together.

    Raises:
        CapacityError: it does not hold one layer's working set; the smallest that does is named.
    """
    page = budget.page_tokens * token_bytes
    layer_page = page // num_layers
    many = max(1, min(SEGMENT_BYTES // page, budget.nbytes // (IN_SHARE * IN_SLOTS * layer_page)))
    for count in (many, 1):
        left = budget.nbytes - OUT_SLOTS * page - IN_SLOTS * count * layer_page
        if left >= FEWEST_PAGES * page:
            return PageSizes(
                budget.page_tokens, page, left // page, count * budget.page_tokens, count * page, count * layer_page
            )
    least = (FEWEST_PAGES + OUT_SLOTS) * page + IN_SLOTS * layer_page
    raise CapacityError(
        f"kv_vram of {gib(budget.nbytes)} ({budget.nbytes} bytes) does not hold {FEWEST_PAGES} pages of "
        f"{budget.page_tokens} tokens and the buffers that they move through: {least} bytes are the least",
        hint=f"kv_vram={least} or more, or smaller pages (KVBudget(page_tokens=…))",
    )
