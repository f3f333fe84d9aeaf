"""The main job on real input, start to finish: warm a document folder, ask, and see what was not prefilled.

``make demo`` runs it on a small town guide (``benchmarks/demo_docs``) with the small embedded model. Any folder will
do: ``python benchmarks/demo.py --docs FOLDER --question "..."``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from rank_bm25 import BM25Plus

from kvboost_rag import Corpus, KVBoost, Result, SourceChunk, SplitOptions

ROOT = Path(__file__).parent.parent
FIRST = "How long does the crossing to the island take?"
QUESTION = "Who was the last keeper of the lighthouse and how long did he serve?"
SYSTEM = "Answer the question in one sentence, from the context."
ROWS: tuple[tuple[str, dict[str, str]], ...] = (
    ("plain prefill", {"reuse": "off"}),
    ("exact prefix only", {"reuse": "prefix"}),
    ("chunks, no repair", {"reuse": "chunks", "repair": "fast"}),
    ("chunks, balanced", {"reuse": "chunks", "repair": "balanced"}),
    ("chunks, faithful", {"reuse": "chunks", "repair": "faithful"}),
)


def messages(chunks: list[SourceChunk], question: str) -> list[dict[str, str]]:
    context = "\n\n".join(c.text for c in chunks)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{context}\n\nQuestion: {question}"}]


def retrieve(corpus: Corpus, question: str, k: int) -> list[SourceChunk]:
    """BM25, then an order that was never seen before: retrieval orders change from question to question."""
    known = list(corpus)
    scores = BM25Plus([c.text.lower().split() for c in known]).get_scores(question.lower().split())
    best = sorted(range(len(known)), key=lambda i: -scores[i])[:k]
    chunks = [known[i] for i in best]
    random.Random(len(question)).shuffle(chunks)
    return chunks


def run(args: argparse.Namespace, store: str) -> None:
    started = time.perf_counter()
    corpus = Corpus([args.docs], split=SplitOptions(args.chunk_size, 60), skip_unknown=True)
    with KVBoost.from_pretrained(args.model, store=store) as engine:
        print(f"model {args.model} loaded in {time.perf_counter() - started:.1f} s")
        report = engine.warm(corpus, progress=True)
        rate = f"{report.tokens_per_s:.0f} tokens/s"
        print(f"warmed {report.stored} chunks, {report.tokens} tokens in {report.seconds:.1f} s ({rate})\n")
        # An earlier question, so that "exact prefix" has something to find.
        engine.generate(messages(retrieve(corpus, FIRST, args.k), FIRST), max_new_tokens=1, reuse="prefix")
        prompt = messages(retrieve(corpus, args.question, args.k), args.question)
        common = {"max_new_tokens": 48, "stop": ["\n", ". "]}
        results = [(name, engine.generate(prompt, **common, **options)) for name, options in ROWS]
    show(args.question, results)


def show(question: str, results: list[tuple[str, Result]]) -> None:
    by_name = dict(results)
    balanced = by_name["chunks, balanced"]
    print(f"Q: {question}\nA: {balanced.text.strip()}\n\n{balanced.report.table()}\n")
    print(f"{'':18} {'prompt':>7} {'forwarded':>10} {'TTFT ms':>8} {'speed-up':>9}")
    base = results[0][1].report.ttft_s
    for name, result in results:
        r = result.report
        print(
            f"{name:18} {r.prompt_tokens:7} {r.forwarded_tokens:10.0f} {1e3 * r.ttft_s:8.0f} {base / r.ttft_s:8.1f}x"
            + ("" if r.exact else "  approximate")
        )
    print("\nanswers:")
    for name, result in results:
        print(f"  {name:18} {result.text.strip()!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", default=str(ROOT / "benchmarks" / "demo_docs"))
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--chunk-size", type=int, default=600)
    parser.add_argument("--store", default="", help="keep the store here (default: a temporary folder)")
    args = parser.parse_args()
    if args.store:
        run(args, args.store)
        return
    with tempfile.TemporaryDirectory(prefix="kvboost-demo-") as folder:
        run(args, folder)


if __name__ == "__main__":
    main()
