"""Group chunks of like length, so that one forward carries several with hardly any padding."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WASTE = 0.06  # share of a batch's token slots that may be padding


def slots(lengths: Sequence[int], *, packed: bool = False) -> int:
    """Token slots of a batch: packed chunks take their own, others as many as the longest each."""
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def group(
    lengths: Sequence[int], batch_tokens: int, max_waste: float = MAX_WASTE, *, packed: bool = False
) -> list[list[int]]:
    """Indices of ``lengths``, partitioned into batches, longest first.

    A batch takes at most ``batch_tokens`` slots (one chunk alone may exceed it), and at most ``max_waste`` of them are
    padding; ``packed`` batches have none. Greedy on the sorted lengths; ties keep their order.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        taken = total + length if packed else longest * (len(batches[-1]) + 1) if batches else 0
        if batches and taken <= batch_tokens and taken - total - length <= max_waste * taken:
            batches[-1].append(index)
            total += length
        else:
            batches.append([index])
            longest = total = length
    return batches
