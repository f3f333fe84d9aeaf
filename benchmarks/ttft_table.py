"""The table of time to first token, from its committed result file; ``tables.py`` puts it into README."""

from __future__ import annotations

from typing import Any

TTFT_ROWS = {
    "hf": "Hugging Face `model(...)`, full prefill",
    "prefix": "`reuse=\"prefix\"`, context in a new order",
    "fast": "`fast`: nothing repaired",
    "balanced": "`balanced` (default)",
    "faithful": "`faithful`",
    "floor": "floor: whole context already in place",
}  # fmt: skip


def machine(result: dict[str, Any]) -> str:
    """Hardware and versions in a few words."""
    e = result["environment"]
    where = e["device"] if e["device"] != "cpu" else f"{e['threads']} cores of {e['cpu']}"
    return f"{where}, torch {e['torch']}, transformers {e['transformers']}"


def ttft(result: dict[str, Any]) -> str:
    """Time to first token by row and dtype; medians with quartiles, ratios side by side in one run."""
    setup, lines = result["setup"], []
    for run in result["results"]:
        lines += [
            f"| {run['dtype']} | TTFT ms (quartiles) | forwarded tokens | against HF | against the floor |",
            "|---|---|---|---|---|",
            *(_ttft_row(TTFT_ROWS[name], row) for name, row in run["rows"].items()),
            "",
        ]
    warm = ", ".join(f"{r['warm_up']['time_per_token_over_hf']:.2f} × ({r['dtype']})" for r in result["results"])
    hits = min(r["hit_ratio"] for r in result["results"])
    lines.append(
        f"{setup['chunks']} chunks × {setup['tokens_per_chunk']} tokens from a pool of {setup['pool']}, random order, "
        f"{setup['queries']} queries, {setup['model']}; hit ratio {hits:.0%}; {machine(result)}. "
        f"Warm-up takes {warm} of Hugging Face's own time per token."
    )
    return "\n".join(lines) + "\n"


def _ttft_row(label: str, row: dict[str, Any]) -> str:
    t = row["ttft_s"]
    box = f"{1e3 * t['median']:.0f} ({1e3 * t['q1']:.0f}–{1e3 * t['q3']:.0f})"
    faster, floor = row["faster_than_hf"]["median"], row["times_floor"]["median"]
    return f"| {label} | {box} | {row['forwarded_tokens']['median']:.0f} | {faster:.1f} × faster | {floor:.2f} × |"
