"""How long it takes to find known chunks in a prompt, from 1,000 to 1,000,000 known chunks.

    python benchmarks/match.py [--sizes 1000,10000] [--out benchmarks/results/match.json]

Each size runs in processes of its own: one writes the anchor file, one opens it and searches, one does both in memory.
Prompts are about 8,000 characters: known chunks in random order between glue and unknown chunks; every fifth prompt has
none. Memory is the growth of the process's resident set (below 100,000 chunks mostly the allocator's noise).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles

import numpy
import xxhash

from kvboost_rag.store.anchors import AnchorIndex

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PROMPTS = 100
HEAD = "Source: handbook of the company, page 1\n"  # 40 characters that many texts share
WORDS = [
    f"{a}{b}{c}" for a in ("ba", "mo", "tri", "sel", "ku") for b in ("na", "ro", "li", "ste") for c in ("", "n", "s")
]
PROSE = " ".join(random.Random(0).choices(WORDS, k=40_000))


def chunk(i: int) -> str:
    """About 500 characters, the same for the same number; no two begin alike."""
    draw = random.Random(i)
    at = draw.randrange(len(PROSE) - 900)
    return f"{' '.join(draw.choices(WORDS, k=3))} {i} {PROSE[at : at + draw.randrange(300, 700)]}".strip()


def alike(i: int) -> str:
    """A text that shares its first 40 characters with 100,000 others of similar length."""
    return f"{HEAD}{chunk(i)}"


def key(i: int) -> str:
    return "kv1:" + hashlib.sha256(i.to_bytes(8, "little")).hexdigest()


def prompts(size: int) -> Iterator[tuple[str, int]]:
    """Prompts with the number of known chunks in each."""
    draw = random.Random(7)
    for n in range(PROMPTS):
        known = [chunk(draw.randrange(size)) for _ in range(8 if n % 5 else 0)]
        unknown = [chunk(10**9 + draw.randrange(10**9)) for _ in range(16 - len(known))]
        parts = known + unknown
        draw.shuffle(parts)
        yield "Use the context.\n\n" + "\n\n".join(parts) + "\n\nQuestion: which one?", len(known)


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def fill(index: AnchorIndex, size: int, text: Callable[[int], str] = chunk) -> float:
    """Seconds of ``add`` alone, without making the texts."""
    seconds = 0.0
    for first in range(0, size, 50_000):
        pairs = [(text(i), key(i)) for i in range(first, min(size, first + 50_000))]
        seconds += timed(lambda pairs=pairs: index.add(pairs)) / 1e3  # type: ignore[misc]
    return seconds


def write(path: Path, size: int) -> dict[str, float]:
    with_file = fill(AnchorIndex(path), size)
    return {"add_s": round(with_file, 3), "file_bytes_per_chunk": round(path.stat().st_size / size, 2)}


def search(path: Path, size: int) -> dict[str, float]:
    jobs = list(prompts(size))
    AnchorIndex().find(jobs[0][0])  # tables of powers and the like are not the index's
    before = resident()
    start = time.perf_counter()
    index = AnchorIndex(path)
    opened = time.perf_counter() - start
    after = resident()
    times = []
    for prompt, known in jobs:
        times.append(timed(lambda prompt=prompt: index.find(prompt)))  # type: ignore[misc]
        assert sum(bool(s.keys) for s in index.find(prompt).spans) == known, "a chunk was missed"
    return {
        "open_s": round(opened, 4),
        "find_ms_median": round(median(times), 3),
        "find_ms_p90": round(quantiles(times, n=10)[-1], 3),
        "find_ms_max": round(max(times), 3),
        "prompt_chars_median": int(median(len(prompt) for prompt, _ in jobs)),
        "resident_bytes_per_chunk": round((after - before) / size, 2),
        "resident_bytes_per_chunk_after_searches": round((resident() - before) / size, 2),
    }


def memory(size: int) -> dict[str, float]:
    AnchorIndex().add([(chunk(i), key(i)) for i in range(2000)])  # what adding needs for a moment
    index, before = AnchorIndex(), resident()
    for first in range(0, size, 1000):  # small batches: the texts themselves should not swell the heap
        index.add((chunk(i), key(i)) for i in range(first, min(size, first + 1000)))
    return {"memory_only_resident_bytes_per_chunk": round((resident() - before) / size, 2)}


def hostile() -> dict[str, object]:
    """Texts that begin alike, and prompts made of nothing but an anchor."""
    index = AnchorIndex()
    fill(index, 100_000, alike)
    draw = random.Random(3)
    chosen = [[alike(draw.randrange(100_000)) for _ in range(8)] for _ in range(50)]
    times = []
    for texts in chosen:
        prompt = "\n".join(f"{text}\n{HEAD}and nothing that is known" for text in texts)
        times.append(timed(lambda prompt=prompt: index.find(prompt)))  # type: ignore[misc]
        assert sum(bool(s.keys) for s in index.find(prompt).spans) == 8
    repeated = {n * len(HEAD): timed(lambda n=n: index.find(HEAD * n)) for n in (200, 400, 2000)}  # type: ignore[misc]
    nested = AnchorIndex()
    nested.add([("a" * n + "!", key(n)) for n in range(200, 1200)])
    runs = {n: timed(lambda n=n: nested.find("a" * n)) for n in (8_000, 16_000, 80_000)}  # type: ignore[misc]
    return {
        "100000_texts_sharing_40_chars_find_ms": {"median": round(median(times), 3), "max": round(max(times), 3)},
        "that_anchor_repeated_find_ms_by_chars": {str(n): round(ms, 2) for n, ms in repeated.items()},
        "1000_texts_of_one_letter_find_ms_by_chars": {str(n): round(ms, 2) for n, ms in runs.items()},
    }


def child(*arguments: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, __file__, "--step", *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}


def run(sizes: list[int]) -> dict[str, object]:
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "anchors.bin"
            row = {"known_chunks": size, **child("write", size, path), **child("search", size, path)}
            rows.append({**row, **child("memory", size)})
        print_row(rows[-1])
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__, "xxhash": xxhash.VERSION},
        "prompts_per_size": PROMPTS,
        "rows": rows,
        "hostile": child("hostile"),
    }


COLUMNS = ("known_chunks", "add_s", "open_s", "find_ms_median", "find_ms_p90", "file_bytes_per_chunk",
           "resident_bytes_per_chunk", "memory_only_resident_bytes_per_chunk")  # fmt: skip
TITLES = ("known", "add s", "open s", "find ms", "p90 ms", "file B", "resident B", "memory-only B")


def print_row(row: dict[str, object]) -> None:
    print("  ".join(f"{row[column]!s:>13}" for column in COLUMNS), flush=True)


def step(name: str, size: str = "0", path: str = "") -> dict[str, object]:
    steps: dict[str, Callable[[], dict[str, object]]] = {
        "write": lambda: {**write(Path(path), int(size))},
        "search": lambda: {**search(Path(path), int(size))},
        "memory": lambda: {**memory(int(size))},
        "hostile": hostile,
    }
    return steps[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of known chunks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "match.json")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(*options.step)))
        return
    print("  ".join(f"{title:>13}" for title in TITLES))
    result = run([int(size) for size in options.sizes.split(",")])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["hostile"], indent=2))


if __name__ == "__main__":
    main()
