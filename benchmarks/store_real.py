"""Part of ``store.py``: the small model's own blocks, since how far bytes can be squeezed depends on what they say."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from kvboost_rag import KVBoost
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.choice import CHOICES, parse_compression
from kvboost_rag.kv.codec import LayerReader, decode_block, encode_block
from kvboost_rag.kv.compress import compress

DOCUMENTS = Path(__file__).parent / "demo_docs"
DTYPES = ("float32", "bfloat16")
REPEATS = 7


def back_times(data: bytes) -> dict[int, float]:
    """Seconds from a block's bytes to K and V, without checksums, by number of threads; medians. Results are kept, so that
    each is written into memory that nobody used before."""
    buffer, threads, found = bytearray(data), torch.get_num_threads(), {}
    for count in (1, 2):
        torch.set_num_threads(count)
        times, kept = [], [decode_block(buffer, verify=False)]
        for _ in range(REPEATS):
            started = time.perf_counter()
            kept.append(decode_block(buffer, verify=False))
            times.append(time.perf_counter() - started)
        found[count] = median(times)
    torch.set_num_threads(threads)
    return found


def layers_time(data: bytes) -> float:
    """Seconds from a block's bytes to K and V layer by layer, each forgotten before the next, so in memory that was used
    before; checksums included, by one thread."""
    buffer, threads, times = bytearray(data), torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(REPEATS):
        started = time.perf_counter()
        reader = LayerReader(buffer)
        for index in range(reader.shape[0]):
            reader.layer(index)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return median(times)


def model_blocks(dtype: str) -> list[Block]:
    """One block for each of the demo's documents."""
    engine = KVBoost.from_pretrained("smollm2", store="memory", dtype=dtype, prefix_bytes=0)
    engine.warm([path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.iterdir())])
    found = [engine.store.get(key) for key in engine.store.keys()]  # noqa: SIM118 - a store is not a dict
    engine.close()
    return [block for block in found if isinstance(block, Block)]


def real_blocks() -> dict[str, dict[str, float]]:
    """``"dtype kind"`` → bytes per token and speeds, means over the blocks. GB/s are of K and V as the model sees them in
    that dtype."""
    rows = {}
    for dtype in DTYPES:
        blocks = model_blocks(dtype)
        tokens, size = sum(block.num_tokens for block in blocks), sum(block.nbytes for block in blocks)
        for kind in CHOICES:
            choice, stored, write_s, layers_s = parse_compression(kind), 0, 0.0, 0.0
            for block in blocks:
                started = time.perf_counter()
                data = encode_block(compress(block, choice.rounding, unpack=False), framed=choice.framed)
                write_s += time.perf_counter() - started
                stored += len(data)
                layers_s += layers_time(data)
            rows[f"{dtype} {kind}"] = {
                "bytes_per_token": stored / tokens,
                "share": stored / size,
                "encode_gb_s": size / write_s / 1e9,
                "layers_gb_s": size / layers_s / 1e9,
            }
    return rows
