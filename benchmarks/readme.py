"""Write the tables of README and docs from the committed result files. ``--check`` fails when they drift.

Usage: ``python benchmarks/readme.py [--check]``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NAMES = {
    "hf": "HF `model(...)`, full prefill",
    "prefix": 'exact prefix only (`reuse="prefix"`)',
    "fast": "chunks, `fast`",
    "balanced": "chunks, `balanced` (default)",
    "faithful": "chunks, `faithful`",
    "floor": "floor: context in place, question only",
}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def numbers() -> str:
    """README: time to first token, warm-up, matching."""
    data = load("ttft")
    env, setup = data["environment"], data["setup"]
    lines = [
        f"SmolLM2-135M-Instruct, {setup['chunks']} chunks of {setup['tokens_per_chunk']} tokens from a pool of "
        f"{setup['pool']} in random order, {setup['queries']} queries, all rows in one run, hit ratio 100 %. "
        f"{env['threads']} cores of {env['cpu']}, torch {env['torch']}, transformers {env['transformers']}, "
        f"{env['date'][:10]}. Median (quartiles).",
    ]
    for result in data["results"]:
        lines += ["", f"| {result['dtype']} | TTFT ms | forwarded tokens | faster than HF | × floor |"]
        lines += ["|---|---|---|---|---|"]
        lines += [ttft_row(name, row) for name, row in result["rows"].items()]
    rates = ", ".join(f"{r['warm_up']['time_per_token_over_hf']:.2f} × ({r['dtype']})" for r in data["results"])
    lines += ["", f"Warm-up takes {rates} of HF's own forward time per token at the same lengths."]
    lines += ["", matching(), "", "Scripts: `benchmarks/ttft.py`, `benchmarks/match.py`; results beside them."]
    return "\n".join(lines)


def ttft_row(name: str, row: dict[str, Any]) -> str:
    t = row["ttft_s"]
    return (
        f"| {NAMES[name]} | {1e3 * t['median']:.0f} ({1e3 * t['q1']:.0f}-{1e3 * t['q3']:.0f}) "
        f"| {row['forwarded_tokens']['median']:.0f} | {row['faster_than_hf']['median']:.1f} × "
        f"| {row['times_floor']['median']:.2f} |"
    )


def matching() -> str:
    rows = load("match")["rows"]
    parts = [f"{r['known_chunks']:,} known ones: {r['find_ms_median']:.1f} ms" for r in rows]
    return "Finding the chunks of an 8,500-character prompt among " + "; ".join(parts) + "."


TABLES: dict[tuple[str, str], Callable[[], str]] = {("README.md", "numbers"): numbers}


def fill(text: str, marker: str, table: str) -> str:
    """Replace what stands between ``<!-- marker:start -->`` and ``<!-- marker:end -->``."""
    pattern = re.compile(rf"(<!-- {marker}:start -->\n).*?(<!-- {marker}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no markers for {marker}")
    return pattern.sub(lambda m: m[1] + table.strip() + "\n" + m[2], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    drifted = []
    for (page, marker), make in TABLES.items():
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = fill(before, marker, make())
        if before != after and check:
            drifted.append(f"{page}: {marker}")
        elif before != after:
            path.write_text(after, encoding="utf-8")
    if drifted:
        sys.exit(f"tables drift from the result files, run `python benchmarks/readme.py`: {', '.join(drifted)}")


if __name__ == "__main__":
    main()
