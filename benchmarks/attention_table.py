"""The tables of ``attention.json``: the operation, and whole prefills."""

from __future__ import annotations

from typing import Any

TITLES = {"eager": "eager", "sdpa": "torch's SDPA", "ours": "ours"}


def attention(result: dict[str, Any], what: str) -> str:
    """Seconds and peak memory of ``what`` (``"operation"`` or ``"prefill"``), by length."""
    names = list(TITLES.values())
    head = ["tokens", *(f"{n}, s" for n in names), *(f"{n}, MiB" for n in names), "eager / SDPA, time"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        if row["what"] != what:
            continue
        seconds = [row[way]["seconds"]["median"] for way in TITLES]
        memory = [row[way]["peak_bytes"]["median"] / 2**20 for way in TITLES]
        cells = [f"{row['tokens']:,}", *(f"{s:.3f}" if s < 1 else f"{s:.1f}" for s in seconds)]
        cells += [f"{m:,.0f}" for m in memory]
        cells.append(f"{seconds[0] / seconds[1]:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
