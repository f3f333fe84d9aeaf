"""The store alone: bytes per token, write and read speed, first-layer latency, look-up times by number of blocks.

    python benchmarks/store.py
    python benchmarks/store.py --blocks 1000,10000 --folder /mnt/nvme/bench

Reads are warm (the page cache holds what was just written) unless they are called cold: they show what the code costs,
not the disk. GB/s are of K and V as the model sees them in bfloat16, whatever was stored. *Layers* is from a block's bytes in
memory to K and V (dequantised, out of their frames, checksums included) layer by layer, into memory that was used before,
by one thread; *back* the whole block at once, into memory that nobody used before, checksums left out, by one thread and by
two. *From 1 GB/s* is *layers* plus the time of a disk that reads 1 GB/s. Bytes and speed of zstd are measured on the small
model's own blocks (``store_real.py``). A Redis server is measured where one is installed. The many
blocks lie in memory (``/dev/shm``) if there is room, since making and removing a million files would measure the file
system; they take 5 GB. ``python benchmarks/tables.py`` puts the tables into ``docs/store.md``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import environment, write_result
from store_real import back_times, layers_time, real_blocks

from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import DiskStore, MemoryStore, Miss, open_store
from kvboost_rag.store.disk_files import block_name

SHAPES = {"SmolLM2-135M": (30, 3, 64), "Llama-3.1-8B": (32, 8, 128)}  # layers, KV heads, head size
TOKENS = 512
KINDS = ("none", "int8", "int4")
SHM = Path("/dev/shm")  # memory as a file system, on Linux
WRITERS = 2  # processes that lay out the files


def seconds(work: Callable[[], Any], repeats: int = 5, before: Callable[[], Any] = lambda: None) -> float:
    """Median time of a call; ``before`` each is not counted."""
    times = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def block_of(
    shape: tuple[int, int, int], seed: int, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16
) -> Block:
    """A block with K and V like a model's: channels stand out in K."""
    layers, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, heads, tokens, head_dim, generator=generator)
    kv[:, 0] += 5 * torch.randn(layers, heads, 1, head_dim, generator=generator)
    header = BlockHeader(fingerprint="fp1:bench", context="c", context_kind="canonical", created_s=time.time())
    return Block(kv.to(dtype), tuple(range(seed, seed + tokens)), header)


def throughput(folder: Path, name: str, kind: str) -> dict[str, float]:
    """Write, read and unpack one model's blocks in a folder."""
    blocks = [block_of(SHAPES[name], seed) for seed in range(4)]
    size = blocks[0].nbytes
    with DiskStore(folder, min_free_bytes=0, compression=kind) as store:
        started = time.perf_counter()
        assert all(store.put(block) for block in blocks)
        write_s = (time.perf_counter() - started) / len(blocks)
        key, path = blocks[0].key, store.files.path(blocks[0].key)
        assert path is not None
        stored = path.stat().st_size
        read_s = seconds(lambda: store.get(key))
        keys = [block.key for block in blocks]
        many_s = seconds(lambda: store.get_many(keys)) / len(keys)
        first_s = seconds(lambda: first_layer(store, key))
        cold_first_s = seconds(lambda: first_layer(store, key), before=lambda: drop_from_cache(path))
        cold_read_s = seconds(lambda: store.get(key), before=lambda: drop_from_cache(path))
        back_s, layers_s = back_times(path.read_bytes()), layers_time(path.read_bytes())
    return {
        "bytes_per_token": stored / TOKENS,
        "share_of_bf16": stored / size,
        "write_gb_s": size / write_s / 1e9,
        "read_gb_s": size / read_s / 1e9,
        "read_many_gb_s": size / many_s / 1e9,
        **{f"back_{threads}_gb_s": size / s / 1e9 for threads, s in back_s.items() if kind != "none"},
        "layers_gb_s": size / layers_s / 1e9,
        "from_1_gb_s_ms": stored / 1e6 + layers_s * 1e3,
        "first_layer_ms": first_s * 1e3,
        "all_layers_ms": read_s * 1e3,
        "cold_first_layer_ms": cold_first_s * 1e3,
        "cold_all_layers_ms": cold_read_s * 1e3,
    }


def first_layer(store: DiskStore, key: str) -> torch.Tensor:
    """The first layer of a block, verified (and unpacked), as it can be used."""
    found = store.layers(key)
    assert not isinstance(found, Miss)
    return found.layer(0).clone()


def drop_from_cache(path: Path) -> None:
    """Let the next read of a file come from the disk, where the system does as it is told."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tiny_block(number: int) -> Block:
    """One of a million: 4 tokens."""
    header = BlockHeader(fingerprint="fp1:bench", context="c", context_kind="canonical", created_s=1.0)
    return Block(torch.zeros(1, 2, 1, 4, 8), (number, 1, 2, 3), header)


def lay_out(share: tuple[str, int, int]) -> None:
    """Write files of blocks by hand, for writing them safely is measured elsewhere."""
    folder, first, stop = share
    for number in range(first, stop):
        block = tiny_block(number)
        with open(f"{folder}/{block_name(block.key)}", "wb", buffering=0) as file:
            file.write(encode_block(block))


def scale(folder: Path, count: int) -> dict[str, float]:
    """Look-ups among ``count`` tiny blocks."""
    DiskStore(folder, 1 << 50, min_free_bytes=0).close()
    for number in range(256):
        (folder / f"blocks/{number:02x}").mkdir()
    cuts = [count * i // WRITERS for i in range(WRITERS + 1)]
    with get_context("fork").Pool(WRITERS) as pool:
        pool.map(lay_out, [(str(folder), *cut) for cut in pairwise(cuts)])
    for name in ("index/cache.db", ".indexed"):
        (folder / name).unlink(missing_ok=True)
    started = time.perf_counter()
    with DiskStore(folder, min_free_bytes=0):
        build_s = time.perf_counter() - started
    step = max(1, count // 1000)
    keys = [tiny_block(number).key for number in range(0, count, step)]
    tens = [keys[at : at + 10] for at in range(0, len(keys) - 9, 10)]
    started = time.perf_counter()
    with DiskStore(folder, min_free_bytes=0) as store:
        open_s = time.perf_counter() - started
        assert store.stats().blocks == count
        hits = [seconds(lambda ten=ten: store.get_many(ten), 1) for ten in tens]
        misses = [seconds(lambda ten=ten: store.get_many([f"kv1:{k[4:][::-1]}" for k in ten]), 1) for ten in tens]
        touch_s = seconds(store.flush, 1)
        assert store.stats().hits == 10 * len(tens)
        writes = [seconds(lambda i=i: store.put(tiny_block(count + i)), 1) for i in range(20)]
    memory = MemoryStore()
    for number in range(min(count, 1000)):
        memory.put(tiny_block(number * step))
    return {
        "build_index_s": build_s,
        "open_ms": open_s * 1e3,
        "ten_hits_ms": median(hits) * 1e3,
        "ten_misses_ms": median(misses) * 1e3,
        "write_ms": median(writes) * 1e3,
        "note_uses_ms": touch_s * 1e3,
        "ten_hits_memory_ms": seconds(lambda: memory.get_many(keys[:10])) * 1e3,
    }


def roomy(folder: Path | None, count: int) -> Path | None:
    """Where ``count`` tiny blocks go: memory, if no folder was given and there is room for twice as many."""
    if folder is None and SHM.is_dir() and shutil.disk_usage(SHM).free > 10_000 * count:
        return SHM
    return folder


@contextmanager
def redis_server() -> Iterator[str | None]:
    """The URL of a fresh server on loopback, or None where there is none installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([*words, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def remote(url: str, name: str, kind: str) -> dict[str, float]:
    """One model's blocks on a server."""
    blocks = [block_of(SHAPES[name], seed) for seed in range(4)]
    size, keys = blocks[0].nbytes, [block.key for block in blocks]
    with open_store(f"{url}?prefix={name}:{kind}:", memory_bytes=0, compression=kind) as store:
        started = time.perf_counter()
        assert all(store.put(block) for block in blocks)
        write_s = (time.perf_counter() - started) / len(blocks)
        read_s = seconds(lambda: store.get_many(keys)) / len(keys)
        miss_s = seconds(lambda: store.get_many([f"kv1:{key[4:][::-1]}" for key in keys]), 20)
    return {"write_gb_s": size / write_s / 1e9, "read_gb_s": size / read_s / 1e9, "four_misses_ms": miss_s * 1e3}


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """A table, on stdout."""
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[c]:,.3g}' if row[c] < 1000 else f'{row[c]:,.0f}' for c in columns)} |")


def main() -> None:
    """Measure, print tables, write ``results/store.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="1000,10000,100000,1000000")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    args = parser.parse_args()
    counts = [int(count) for count in args.blocks.split(",")]
    torch.set_num_threads(min(2, torch.get_num_threads()))
    started = time.perf_counter()
    result: dict[str, Any] = {"environment": environment(), "tokens": TOKENS, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=args.folder) as top:
        cases = [(name, kind) for name in SHAPES for kind in KINDS]
        result["disk"] = {f"{n} {k}": throughput(Path(top) / f"{n}-{k}", n, k) for n, k in cases}
        show("Folder", {name: row for name, row in result["disk"].items() if name.endswith("none")})
        show("Folder, rounded", {name: row for name, row in result["disk"].items() if not name.endswith("none")})
        result["real"] = real_blocks()
        show("Blocks of the small model", result["real"])
        with redis_server() as url:
            if url is not None:
                result["redis"] = {f"{n} {k}": remote(url, n, k) for n, k in cases}
                show("Redis on loopback", result["redis"])
    result["scale"] = {}
    with tempfile.TemporaryDirectory(dir=roomy(args.folder, max(counts))) as top:
        result["many_blocks_in"] = "memory" if top.startswith(str(SHM)) else "folder"
        for count in counts:
            print(f"{count:,} blocks …", file=sys.stderr, flush=True)
            result["scale"][f"{count:,}"] = scale(Path(top) / str(count), count)
            shutil.rmtree(Path(top) / str(count))
        show("Look-ups by number of blocks", result["scale"])
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    print(f"\n{write_result('store', result)}")


if __name__ == "__main__":
    main()
