"""Time to first token when blocks come from a slow tier: waited for, and used layer by layer as they come in.

8 chunks of 256 tokens from a pool of 24, in random order, no memory tier and nothing held, so that every query loads all
of its blocks. Slow tiers are a folder behind a line of fixed bandwidth that all reads share; the plain folder is read
with its files dropped from the page cache before each answer, and once more with them in it. Both ways answer each query
one after the other, in turns; ratios are of such pairs. The first tokens must be the same.

    python benchmarks/overlap.py                       # under 4 minutes on two cores
    python benchmarks/overlap.py --dtype bfloat16 --queries 20 --compression int8
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import environment, pool_of_chunks, spread, write_result
from ttft import CHUNKS, POOL, TOKENS, messages

from kvboost_rag import KVBoost
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store import DiskStore, Miss
from kvboost_rag.store.arriving import ArrivingBlock

LINES = (0.1, 0.3, 1.0)  # GB/s
POLICIES = ("fast", "balanced")


class Line:
    """A line that carries so many bytes a second, for all who use it together."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, nbytes: float) -> None:
        with self._lock:
            self._free_at = max(time.perf_counter(), self._free_at) + nbytes / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class SlowDisk(DiskStore):
    """A folder behind a line."""

    def __init__(self, folder: Path, line: Line) -> None:
        super().__init__(folder)
        self.line = line

    def _bytes(self, key: str) -> int:
        return self.files.path(key).stat().st_size  # type: ignore[union-attr]

    def get(self, key: str) -> Block | Miss:
        found = super().get(key)
        if isinstance(found, Block):
            self.line.carry(self._bytes(key))
        return found

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        return [self._slow(found) for found in super().open_many(keys)]

    def _slow(self, found: Block | ArrivingBlock | Miss) -> Block | ArrivingBlock | Miss:
        if not isinstance(found, ArrivingBlock):
            return found
        layer_bytes = self._bytes(found.key) / found.num_layers

        def read(index: int) -> None:
            self.line.carry(layer_bytes)
            found.read(index)

        return ArrivingBlock(LayeredBlock(found.header, found.token_ids, found.kv, read))


def drop_from_page_cache(store: DiskStore) -> None:
    """What is not dirty leaves the page cache (files are synced when they are written)."""
    for path in store.files.walk():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    first = KVBoost.from_pretrained(args.model, dtype=args.dtype, store=DiskStore(folder, compression=args.compression))
    tok = first.tokenizer
    pool = pool_of_chunks(
        lambda t: tok(t, add_special_tokens=False).input_ids, lambda i: tok.decode(i, skip_special_tokens=False),
        POOL, TOKENS,
    )  # fmt: skip
    first.warm(pool)
    tiers: dict[str, DiskStore] = {f"line of {gbs:g} GB/s": SlowDisk(folder, Line(gbs * 1e9)) for gbs in LINES}
    tiers |= {"folder, cold": DiskStore(folder), "folder, in the page cache": DiskStore(folder)}
    options: dict[str, Any] = {"prefix_bytes": 0, "on_low_fidelity": "ignore"}
    engines = {
        name: {
            "waiting": KVBoost(first.model, tok, store=store, overlap=False, **options),
            "overlapped": KVBoost(first.model, tok, store=store, overlap="auto", **options),
        }
        for name, store in tiers.items()
    }
    rows: dict[str, dict[str, list[Any]]] = {}
    rng = random.Random(0)
    for query in range(-1, args.queries):  # the first one touches every code path
        for name, pair in engines.items():
            for policy in POLICIES:
                prompt = messages(rng.sample(pool, CHUNKS), f"What is described here? ({name}, {policy}, {query})")
                order = ("waiting", "overlapped") if query % 2 else ("overlapped", "waiting")
                seen = {}
                for way in order:
                    if "page cache" not in name:
                        drop_from_page_cache(tiers[name])
                    seen[way] = pair[way].generate(prompt, max_new_tokens=1, repair=policy)
                    assert seen[way].report.hits == CHUNKS, seen[way].report.table()
                assert seen["waiting"].token_ids == seen["overlapped"].token_ids
                assert seen["waiting"].report.forwarded_tokens == seen["overlapped"].report.forwarded_tokens
                if query >= 0:
                    for way, result in seen.items():
                        rows.setdefault(f"{name}: {policy}", {}).setdefault(way, []).append(result.report)
    nbytes = sum(path.stat().st_size for path in tiers["folder, cold"].files.walk()) / POOL * CHUNKS
    return {"bytes_per_query": nbytes, "rows": {name: summary(ways) for name, ways in rows.items()}}


def summary(ways: dict[str, list[Any]]) -> dict[str, Any]:
    """Times in seconds; ``faster`` is the waiting way's time over the overlapped one's, pair by pair."""
    pairs = list(zip(ways["waiting"], ways["overlapped"], strict=True))
    out: dict[str, Any] = {
        way: {
            "ttft_s": spread([r.ttft_s for r in reports]),
            "stages_s": {s: spread([r.stages.get(s, 0.0) for r in reports])["median"] for s in reports[0].stages},
        }
        for way, reports in ways.items()
    }
    return out | {"faster": spread([w.ttft_s / o.ttft_s for w, o in pairs])}


def show(result: dict[str, Any]) -> None:
    print(f"{result['bytes_per_query'] / 1e6:.0f} MB of blocks a query")
    print(f"{'tier: policy':38} {'waiting ms':>20} {'overlapped ms':>20} {'faster':>20}")
    for name, row in result["rows"].items():
        cells = []
        for way in ("waiting", "overlapped"):
            t = row[way]["ttft_s"]
            cells.append(f"{1e3 * t['median']:.0f} ({1e3 * t['q1']:.0f}-{1e3 * t['q3']:.0f})")
        f = row["faster"]
        cells.append(f"{f['median']:.2f} ({f['q1']:.2f}-{f['q3']:.2f})")
        print(f"{name:38} {cells[0]:>20} {cells[1]:>20} {cells[2]:>20}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--folder", help="where the blocks lie meanwhile (a temporary folder)")
    parser.add_argument("--out", default="overlap")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(args, Path(folder))
    show(result)
    setup = {k: getattr(args, k) for k in ("model", "dtype", "compression", "queries")}
    setup |= {"chunks": CHUNKS, "tokens_per_chunk": TOKENS, "pool": POOL}
    print(f"written to {write_result(args.out, {'environment': environment(), 'setup': setup, **result})}")


if __name__ == "__main__":
    main()
