"""README's tables, made from the committed result files: ``python benchmarks/tables.py`` rewrites what stands between
``<!-- table NAME -->`` and ``<!-- end -->``. A test compares them, so no figure is typed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TTFT_ROWS = {
    "hf": "Hugging Face `model(...)`, full prefill",
    "prefix": "`reuse=\"prefix\"`, context in a new order",
    "fast": "`fast`: nothing repaired",
    "balanced": "`balanced` (default)",
    "faithful": "`faithful`",
    "floor": "floor: whole context already in place",
}  # fmt: skip


def load(name: str) -> dict[str, Any]:
    """A committed result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def machine(result: dict[str, Any]) -> str:
    """Hardware and versions in a few words."""
    e = result["environment"]
    where = e["device"] if e["device"] != "cpu" else f"{e['threads']} cores of {e['cpu']}"
    return f"{where}, torch {e['torch']}, transformers {e['transformers']}"


def ttft() -> str:
    """Time to first token by row and dtype; medians with quartiles, ratios side by side in one run."""
    result = load("ttft")
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


TABLES: dict[str, Callable[[], str]] = {"ttft": ttft}


def rewritten(page: str) -> str:
    """``page`` with every marked table made anew."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], page)


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(rewritten(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
