"""The tables of docs/fidelity.md, store.md, big-models.md and README.md, made from the committed result files: no figure is
typed by hand.

    python benchmarks/tables.py            # rewrite what stands between markers, print the README block
    python benchmarks/tables.py --check    # change nothing; exit 1 where a document is out of date

A document says ``<!-- begin NAME -->`` … ``<!-- end NAME -->``. ``NAME`` is a result file's stem (the whole table of that
run), ``overview`` (one line per run, our three points), ``short`` (the README block), ``ttft`` (time to first token), ``match``,
or one of those of ``store_table.py``: ``store-sizes``, ``store-lossless``, ``store-speed``, ``store-scale``,
``store-known``, ``compression``; ``attention-operation``, ``attention-prefill``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import store_table
from attention_table import attention
from fidelity_policies import BY_NAME
from ttft_table import ttft

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
DOCUMENTS = (*(ROOT / "docs" / f"{name}.md" for name in ("fidelity", "store", "big-models")), ROOT / "README.md")
POINTS = ("fast", "balanced", "faithful")
SHORT = (
    ("fidelity-squad-held", "SQuAD, 8 paragraphs"),
    ("fidelity-musique-held", "MuSiQue, 8 × 256 tokens"),
)
OVERVIEW = (
    *SHORT,
    ("fidelity-needle", "needle, 8 × 128"),
    ("fidelity-multineedle", "two needles, 8 × 128"),
    ("fidelity-twohop", "two hops, 8 × 128"),
    ("fidelity-chunks-64", "MuSiQue, 8 × 64"),
    ("fidelity-chunks-512", "needle, 4 × 512"),
    ("fidelity-chunks-1024", "needle, 3 × 1024"),
    ("fidelity-shuffled", "MuSiQue, 8 × 256, passages shuffled"),
)
BLOCK = re.compile(r"(<!-- begin (?P<name>[\w-]+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def load(stem: str, results: Path = RESULTS) -> dict[str, Any]:
    """A committed result file. Raises ``SystemExit`` where there is none."""
    path = results / f"{stem}.json"
    if not path.is_file():
        raise SystemExit(f"no result file {path.name}; the script that makes it: benchmarks/{_script(stem)}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _script(stem: str) -> str:
    own = {
        "ttft": "ttft.py",
        "match": "match.py",
        "store": "store.py",
        "attention": "attention.py",
        "compression_squad": "compression.py",
    }
    return own.get(stem, f"fidelity.py --out {stem}")


def kl_with_interval(row: dict[str, Any], over: str) -> str:
    low, high = row["ci95"][f"kl_{over}"]
    return f"{row[f'kl_{over}']:.3f} ({low:.3f}–{high:.3f})"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def whole(stem: str, results: Path = RESULTS) -> str:
    """Every row of one run."""
    found = load(stem, results)
    over = found["kl_over"]
    gap = over == "gold"  # elsewhere the passages do not help with the gold answer: there is no gap to close
    head = ["policy", "what it is", f"KL over the {over} answer (95 %)", "same token", "same text"]
    head += ["NLL gap closed", "mean abs. ΔNLL", "F1", "F1 gap closed"] if gap else []
    head += ["recomputed", "forwarded"]
    lines = [f"n={found['n']}, commit {found['environment']['commit']}.", "", *header(head)]
    for name, row in found["rows"].items():
        about = BY_NAME[name].about if name in BY_NAME else "full prefill over the same tokens"
        cells = [f"`{name}`", about, kl_with_interval(row, over), percent(row["agreement"]), percent(row["same_text"])]
        if gap:
            cells += [percent(row.get("gap_nll_gold")), f"{row['d_nll']:.2f}"]
            cells += [f"{row['f1']:.2f}", percent(row.get("gap_f1"))]
        lines.append(table_row([*cells, percent(row["repaired_share"]), percent(row["forwarded_share"])]))
    return "\n".join(lines) + "\n"


def points(runs: tuple[tuple[str, str], ...], results: Path = RESULTS) -> str:
    """One line per run: the KL of our three points beside that of the naive way, where it was measured."""
    lines = header(["prompts", "n", "alone (naive)", *(f"`{p}`" for p in POINTS)])
    for stem, title in runs:
        if not (results / f"{stem}.json").is_file():
            continue  # not measured
        found = load(stem, results)
        over, rows = found["kl_over"], found["rows"]
        cells = [f"{rows[p][f'kl_{over}']:.3f}" if p in rows else "–" for p in ("alone", *POINTS)]
        lines.append(table_row([title, str(found["n"]), *cells]))
    return "\n".join(lines) + "\n"


def short(results: Path = RESULTS) -> str:
    """README's table: KL, equal tokens and cost of the three points on the two real sets."""
    lines = header(["", *(f"`{p}`" for p in POINTS), "blocks alone (naive)"])
    for stem, title in SHORT:
        found = load(stem, results)
        over, rows = found["kl_over"], found["rows"]
        for label, cell in (
            (f"{title}: KL, nats (n={found['n']})", lambda r, over=over: kl_with_interval(r, over)),
            ("same most likely token", lambda r: percent(r["agreement"])),
            ("forwarded, of full prefill", lambda r: percent(r["forwarded_share"])),
        ):
            lines.append(table_row([label, *(cell(rows[p]) for p in (*POINTS, "alone"))]))
    return "\n".join(lines) + "\n"


def match_times(result: dict[str, Any]) -> str:
    """One sentence on finding known chunks in a prompt, from ``benchmarks/match.py``."""
    few, many = result["rows"][0], result["rows"][-1]
    return (
        f"Finding the chunks of a prompt of {few['prompt_chars_median']:,.0f} characters takes "
        f"{few['find_ms_median']:.1f} ms among {few['known_chunks']:,} known chunks and {many['find_ms_median']:.1f} ms "
        f"among {many['known_chunks']:,}.\n"
    )


def header(cells: list[str]) -> list[str]:
    return [table_row(cells), "|" + "---|" * len(cells)]


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rendered(document: str, results: Path = RESULTS) -> str:
    """``document`` with every block made anew."""
    named: dict[str, Callable[[], str]] = {
        "overview": lambda: points(OVERVIEW, results),
        "short": lambda: short(results),
        "ttft": lambda: ttft(load("ttft", results)),
        "match": lambda: match_times(load("match", results)),
        "store-sizes": lambda: store_table.sizes(load("store", results)),
        "store-lossless": lambda: store_table.lossless(load("store", results)),
        "store-speed": lambda: store_table.speed(load("store", results)),
        "store-scale": lambda: store_table.scale(load("store", results)),
        "store-known": lambda: store_table.known(load("match", results)),
        "attention-operation": lambda: attention(load("attention", results), "operation"),
        "attention-prefill": lambda: attention(load("attention", results), "prefill"),
        "compression": lambda: store_table.fidelity(load("compression_squad", results)),
    }

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return match[1] + (named[name]() if name in named else whole(name, results)) + match[3]

    return BLOCK.sub(block, document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(rendered(text), encoding="utf-8")
    if args.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python benchmarks/tables.py")
    print(short())


if __name__ == "__main__":
    main()
