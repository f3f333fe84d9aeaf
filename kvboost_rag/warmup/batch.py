"""Group chunks of like length, so that one forward carries several with hardly any padding."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WASTE = 0.06  # share of a batch's token slots that may be padding


def group(lengths: Sequence[int], batch_tokens: int, max_waste: float = MAX_WASTE) -> list[list[int]]:
    """Indices of ``lengths``, partitioned into batches, longest first.

    A batch of ``n`` chunks padded to its longest ``m`` has ``n * m <= batch_tokens`` slots (one chunk alone may exceed
    it) and at most ``max_waste`` of them are padding. Greedy on the sorted lengths; ties keep their order.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        slots = longest * (len(batches[-1]) + 1) if batches else 0
        if batches and slots <= batch_tokens and slots - total - length <= max_waste * slots:
            batches[-1].append(index)
            total += length
        else:
            batches.append([index])
            longest = total = length
    return batches
