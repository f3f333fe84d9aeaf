"""What compressed blocks cost in answers, on top of reuse: KL against full prefill, exact and compressed side by side.

    python benchmarks/compression.py --set squad --n 20
    python benchmarks/compression.py --set musique --n 8 --repair fast,balanced,faithful

The reference is full prefill over the same span tokens; KL and agreement are teacher-forced over its greedy answer and
the gold answer. Every store holds the same blocks: the exact ones are computed once and copied, so that rows differ by
the rounding alone.
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean
from typing import Any

import torch
from common import environment, write_result
from fidelity_data import load_set, messages
from fidelity_metrics import agreement, bootstrap, kl, paired_bootstrap

from kvboost_rag import KVBoost, Repair

KINDS = ("none", "int8", "int4")
MAX_NEW_TOKENS = 24


def engines(name: str) -> dict[str, KVBoost]:
    """One engine per compression, over one model."""
    first = KVBoost.from_pretrained(name, store="memory", dtype="float32", prefix_bytes=0)
    model, tokenizer = first.adapter.model, first.adapter.tokenizer
    rest = {k: KVBoost(model, tokenizer, store="memory", compression=k, prefix_bytes=0) for k in KINDS[1:]}
    return {"none": first, **rest}


def measure(by_kind: dict[str, KVBoost], item: Any, policies: list[str]) -> dict[str, dict[str, float]]:
    """``"kind/policy"`` → metrics of one item."""
    base, prompt = by_kind["none"], messages(item)
    base.warm(item.passages)
    for kind in KINDS[1:]:
        store = by_kind[kind].store
        store.clear()
        for key in base.store.keys():  # noqa: SIM118 - a store is not a dict
            store.put(base.store.get(key))
        store.anchors.add([(p.strip(), "kv1:" + "0" * 64) for p in item.passages])
    options: dict[str, Any] = {"chunks": list(item.passages)}
    full = base.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, repair=Repair.full(), **options)
    ways = {"greedy": full.token_ids, "gold": item.answers[0]}
    want = {w: base.score(prompt, a, logits=True, repair=Repair.full(), **options) for w, a in ways.items()}
    out = {}
    for kind in KINDS:
        for policy in policies:
            row: dict[str, float] = {}
            for way, answer in ways.items():
                got = by_kind[kind].score(prompt, answer, logits=True, repair=policy, **options)
                assert all(("int" in c.reason) == (kind != "none") for c in got.report.chunks if c.outcome == "hit")
                row[f"kl_{way}"] = float(kl(want[way].logits, got.logits).mean())
                row[f"agreement_{way}"] = agreement(want[way].logits, got.logits)
                row[f"d_nll_{way}"] = abs(got.nll - want[way].nll)
                row["hits"] = fmean(float(c.outcome == "hit") for c in got.report.chunks)
            out[f"{kind}/{policy}"] = row
    base.store.clear()
    return out


def summary(results: list[dict[str, dict[str, float]]], policies: list[str]) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over items, and the paired difference to exact blocks."""
    rows: dict[str, Any] = {}
    for name in results[0]:
        policy = name.split("/")[1]
        rows[name] = {m: bootstrap([r[name][m] for r in results]) for m in results[0][name]}
        for m in ("kl_greedy", "kl_gold"):
            mine, exact = ([r[n][m] for r in results] for n in (name, f"none/{policy}"))
            rows[name][f"{m}_minus_exact"] = paired_bootstrap(mine, exact)
    return rows


def main() -> None:
    """Measure, print a table, write ``results/compression_<set>.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", default="squad")
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--repair", default="fast,balanced")
    parser.add_argument("--split", default="held")
    parser.add_argument("--chunks", type=int, default=None, help="passages per item; default: all")
    args = parser.parse_args()
    policies = args.repair.split(",")
    by_kind = engines(args.model)
    data = load_set(args.set, by_kind["none"].adapter.tokenizer, n=args.n, split=args.split, chunks=args.chunks)
    results = []
    with torch.inference_mode():
        for number, item in enumerate(data.items, 1):
            results.append(measure(by_kind, item, policies))
            print(f"{number}/{len(data.items)}", file=sys.stderr, flush=True)
            rows = summary(results, policies)
            print_rows(rows, len(results))
            write_result(
                f"compression_{args.set}",
                {
                    "environment": environment(),
                    "model": args.model,
                    "split": args.split,
                    "chunks": args.chunks,
                    "n": len(results),
                    "rows": rows,
                },
            )


def print_rows(rows: dict[str, Any], n: int) -> None:
    """The table, on stdout."""
    print(f"n = {n}; mean [95 % interval]")
    for name, row in rows.items():
        cells = [f"{m} {row[m][0]:.4f} [{row[m][1]:.4f}, {row[m][2]:.4f}]" for m in ("kl_greedy", "kl_gold")]
        cells += [f"{m} {row[m][0]:.3f}" for m in ("agreement_greedy", "agreement_gold", "hits")]
        delta = row["kl_greedy_minus_exact"]
        print(f"{name:14}", "  ".join(cells), f" ΔKL {delta[0]:+.4f} [{delta[1]:+.4f}, {delta[2]:+.4f}]", flush=True)


if __name__ == "__main__":
    main()
