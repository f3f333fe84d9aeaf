"""Time to first token of a RAG prompt: 8 chunks of 256 tokens, drawn from a pool of 24, in random order.

All rows answer the same queries in one run, interleaved. TTFT counts from call entry; no measured prompt was seen
before by the row that answers it (the floor row is the exception by definition: its context is already in place).
Reuse is proved by counting forwarded tokens. Usage: ``python benchmarks/ttft.py [--dtype float32] [--queries 20]``.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from common import environment, pool_of_chunks, spread, write_result

from kvboost_rag import KVBoost

CHUNKS, TOKENS, POOL = 8, 256, 24
SYSTEM = "Answer the question from the context."
QUESTIONS = (
    "What does the context say about names?",
    "Which statement is described here?",
    "How are values compared?",
    "What happens when an error is raised?",
)


def messages(chunks: list[str], question: str) -> list[dict[str, str]]:
    user = "\n\n".join(chunks) + f"\n\nQuestion: {question}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


class HuggingFace:
    """``model(...)`` over the whole prompt, as a user would call it without us (logits of the last row only)."""

    def __init__(self, name: str, dtype: str) -> None:
        own = KVBoost.from_pretrained(name, dtype=dtype, store=None, reuse="off")
        self.model, self.tokenizer = own.model, own.tokenizer
        self.model.set_attn_implementation("sdpa")  # transformers' default

    def ask(self, prompt: list[dict[str, str]]) -> tuple[float, float]:
        started = time.perf_counter()
        ids = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.inference_mode():
            int(self.model(ids, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started, float(ids.shape[1])


def ask(engine: KVBoost, prompt: list[dict[str, str]], **options: Any) -> tuple[float, float, Any]:
    result = engine.generate(prompt, max_new_tokens=1, **options)
    return result.report.ttft_s, result.report.forwarded_tokens, result.report


def measure(model: str, dtype: str, queries: int) -> dict[str, Any]:
    hf = HuggingFace(model, dtype)
    chunked = KVBoost.from_pretrained(model, dtype=dtype, store="memory")
    tok = chunked.tokenizer
    prefix, floor = (KVBoost(chunked.model, tok, store=None, reuse="prefix") for _ in range(2))
    pool = pool_of_chunks(
        lambda t: tok(t, add_special_tokens=False).input_ids, lambda i: tok.decode(i, skip_special_tokens=False),
        POOL, TOKENS,
    )  # fmt: skip
    warm = warm_up(chunked, hf, pool)
    rows: dict[str, list[tuple[float, float]]] = {}
    hits: list[float] = []
    rng = random.Random(0)
    for query in range(-2, queries):  # two unmeasured queries touch every code path; their prompts are not reused
        chunks = rng.sample(pool, CHUNKS)
        question = f"{QUESTIONS[query % len(QUESTIONS)]} (query {query})"
        prompt = messages(chunks, question)
        seen: dict[str, tuple[float, float]] = {"hf": hf.ask(prompt), "prefix": ask(prefix, prompt)[:2]}
        for policy in ("fast", "balanced", "faithful"):
            *pair, report = ask(chunked, prompt, repair=policy)
            seen[policy] = (pair[0], pair[1])
            hits.append(report.hits / CHUNKS)
        ask(floor, messages(chunks, "Something else."))  # puts the context in place
        seen["floor"] = ask(floor, prompt)[:2]
        floor.forget()
        if query >= 0:
            for name, pair in seen.items():
                rows.setdefault(name, []).append(pair)
    return {"dtype": dtype, "warm_up": warm, "hit_ratio": min(hits), "rows": summary(rows)}


def warm_up(engine: KVBoost, hf: HuggingFace, pool: list[str]) -> dict[str, float]:
    """Warm-up speed against HF's own forward, one chunk at a time at the same length; the context is made first."""
    engine.warm([pool[0]])
    started = time.perf_counter()
    report = engine.warm(pool[1:])
    ours = (time.perf_counter() - started) / report.tokens
    started = time.perf_counter()
    with torch.inference_mode():
        for chunk in pool[1:]:
            ids = hf.tokenizer(chunk, add_special_tokens=False, return_tensors="pt").input_ids
            hf.model(ids, logits_to_keep=1)
    theirs = (time.perf_counter() - started) / report.tokens
    return {"tokens_per_s": 1 / ours, "hf_tokens_per_s": 1 / theirs, "time_per_token_over_hf": ours / theirs}


def summary(rows: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Times in seconds; ratios are medians of per-query ratios."""
    out: dict[str, Any] = {}
    for name, pairs in rows.items():
        over_hf = [h[0] / p[0] for h, p in zip(rows["hf"], pairs, strict=True)]
        over_floor = [p[0] / f[0] for f, p in zip(rows["floor"], pairs, strict=True)]
        out[name] = {
            "ttft_s": spread([p[0] for p in pairs]),
            "forwarded_tokens": spread([p[1] for p in pairs]),
            "faster_than_hf": spread(over_hf),
            "times_floor": spread(over_floor),
        }
    return out


def show(result: dict[str, Any]) -> None:
    w = result["warm_up"]
    print(f"\n{result['dtype']}: hit ratio {result['hit_ratio']:.0%}; warm-up {w['tokens_per_s']:.0f} tokens/s")
    print(f"(HF forward {w['hf_tokens_per_s']:.0f} tokens/s: {w['time_per_token_over_hf']:.2f} x the time per token)")
    print(f"{'row':10} {'TTFT ms':>9} {'q1-q3':>15} {'forwarded':>10} {'vs HF':>8} {'vs floor':>9}")
    for name, row in result["rows"].items():
        t = row["ttft_s"]
        box = f"{1e3 * t['q1']:.0f}-{1e3 * t['q3']:.0f}"
        print(
            f"{name:10} {1e3 * t['median']:9.0f} {box:>15} {row['forwarded_tokens']['median']:10.0f} "
            f"{row['faster_than_hf']['median']:7.1f}x {row['times_floor']['median']:8.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--out", default="ttft")
    args = parser.parse_args()
    results = []
    for dtype in args.dtype:
        results.append(measure(args.model, dtype, args.queries))
        show(results[-1])
    setup = {"model": args.model, "chunks": CHUNKS, "tokens_per_chunk": TOKENS, "pool": POOL, "queries": args.queries}
    path = write_result(args.out, {"environment": environment(), "setup": setup, "results": results})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
