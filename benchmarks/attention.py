"""Attention by itself and whole prefills, seconds and peak memory apart: written out (eager), torch's SDPA, and ours.

The operation is causal attention in the heads of the model (keys shared as there). A prefill is the whole small model over
that many tokens of text, logits of the last one: transformers with ``eager`` and ``sdpa``, and the engine with reuse off.
Memory is what the process takes at its peak beyond what it had before the call, as the kernel counts it. Each cell is a
process of its own; the ways of one length follow one another, in turns.

    python benchmarks/attention.py                     # some 17 minutes on two idle cores
    python benchmarks/attention.py --tokens 1024 8000 --repeat 5
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, prose, spread, write_result

from kvboost_rag import KVBoost

WAYS = ("eager", "sdpa", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeat", type=int, default=3, help="processes for each cell")
    parser.add_argument("--out", default="attention", help="name of the result file")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)  # this process measures one: what, way, tokens
    args = parser.parse_args()
    if args.cell:
        what, way, tokens = args.cell
        run = operation(way, int(tokens)) if what == "operation" else prefill(args.model, way, int(tokens))
        print(json.dumps(measured(run)))
        return
    rows = [
        {"what": what, "tokens": n, **cells(args, what, n)} for what in ("operation", "prefill") for n in args.tokens
    ]
    path = write_result(args.out, {"environment": environment(), "model": args.model, "rows": rows})
    print(f"written to {path}")


def cells(args: argparse.Namespace, what: str, tokens: int) -> dict[str, Any]:
    """All ways at one length, in turns."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repeat):
        for way in WAYS:
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--model",
                args.model,
                "--cell",
                what,
                way,
                str(tokens),
            ]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way].append(json.loads(run.stdout.splitlines()[-1]))
    row = {
        way: {"seconds": spread([c["seconds"] for c in cell]), "peak_bytes": spread([c["peak_bytes"] for c in cell])}
        for way, cell in found.items()
    }
    print(
        what,
        tokens,
        {w: (round(c["seconds"]["median"], 3), f"{c['peak_bytes']['median'] / 2**20:.0f} MiB") for w, c in row.items()},
    )
    return row


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the second call; of that call too, the bytes that it took at its peak. The first one is for what is made
    once in a process (threads, tables)."""
    call()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the first call left is taken anew
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - started
    peak = resident("VmHWM")
    del kept
    return {"seconds": seconds, "peak_bytes": max(0, peak - before)}


def resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


@torch.inference_mode()
def operation(way: str, tokens: int) -> Callable[[], Any]:
    """SmolLM2's heads: 9 of 64, 3 of keys."""
    from kvboost_rag.model.attention import RowsPlan

    query = torch.randn(1, tokens, 9, 64).transpose(1, 2)
    key, value = (torch.randn(1, tokens, 3, 64).transpose(1, 2) for _ in range(2))
    positions = torch.arange(tokens)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        if way == "eager":
            keys, values = (x.repeat_interleave(3, dim=1) for x in (key, value))
            scores = (query @ keys.transpose(2, 3)) * 64**-0.5
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
            return scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ values
        if way == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return RowsPlan(positions).attend(0, query, key, value, 64**-0.5)

    return run


def prefill(name: str, way: str, tokens: int) -> Callable[[], Any]:
    engine = KVBoost.from_pretrained(name, dtype="float32", store=None, reuse="off", prefix_bytes=0)
    text = "\n\n".join(prose())
    ids = engine.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens, "not enough text"
    if way == "ours":
        positions = torch.arange(tokens)
        return lambda: engine.adapter.forward(ids[0], positions, engine.adapter.new_buffer(tokens))
    engine.model.set_attn_implementation(way)

    @torch.inference_mode()
    def run() -> Any:
        return engine.model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


if __name__ == "__main__":
    main()
