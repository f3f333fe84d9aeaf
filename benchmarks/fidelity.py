"""What KV reuse costs in answers: every policy against full prefill, on the same items, in one run.

    python benchmarks/fidelity.py --set squad --n 20
    python benchmarks/fidelity.py --set musique --n 8 --policies alone,fast,balanced --split held
    python benchmarks/fidelity.py --set twohop --chunks 8 --chunk-tokens 256 --seed 3
    python benchmarks/fidelity.py --set my.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --plot fidelity.png

Full prefill runs over the same span tokens as reuse; what span-wise tokenising itself changes is the row ``plain``. KL
is KL(full prefill ‖ policy) of the next-token distribution, teacher-forced over full prefill's greedy answer and, on sets
that the gold answer judges, over that. ``tune`` and ``held`` are the halves of a set: defaults were tuned on the first, reports use the second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import environment, write_result
from fidelity_data import DEFAULT_DATA, SPLITS, DataSet, Item, load_set, messages
from fidelity_metrics import agreement, exact_match, f1, kl
from fidelity_policies import DEFAULT, VARIANTS, Outcome, Row, rows
from fidelity_report import summary, table

from kvboost_rag import KVBoost, Repair

MAX_NEW_TOKENS = 24


class Recorder:
    """A logits processor that changes nothing and keeps every step's logits."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores[0].float().cpu().clone())
        return scores


class Reference:
    """Full prefill of one item: its greedy answer and the distributions along it and along the gold answer."""

    def __init__(self, engine: KVBoost, item: Item, style: str, max_new_tokens: int) -> None:
        prompt, recorder = messages(item, style=style), Recorder()
        options: dict[str, Any] = {"chunks": list(item.passages), "repair": Repair.full()}
        result = engine.generate(prompt, max_new_tokens=max_new_tokens, logits_processors=[recorder], **options)
        self.token_ids, self.text = result.token_ids, result.text
        self.logits = torch.stack(recorder.steps)  # [answer, vocab]
        self.report = result.report
        self.gold = engine.score(prompt, item.answers[0], logits=True, **options)
        engine.forget()


class Bench:
    """One model, one engine per variant; holds the blocks of one item at a time."""

    def __init__(self, load: Any, *, style: str = "chat", max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        self._load = load  # (dtype) -> (model, tokenizer)
        self.style = style
        self.max_new_tokens = max_new_tokens
        self.model, self.tokenizer = load("float32")
        self._engines: dict[str, KVBoost] = {}

    def engine(self, variant: str) -> KVBoost:
        """The engine of a variant; prefixes are never held, so no row profits from another's prompt."""
        if variant not in self._engines:
            model = self._load("bfloat16")[0] if variant == "bf16" else self.model
            self._engines[variant] = KVBoost(
                model, self.tokenizer, store="memory", prefix_bytes=0, memory_bytes=4 << 30, **VARIANTS[variant]
            )
        return self._engines[variant]

    def measure(self, item: Item, wanted: Sequence[Row], *, gold: bool = True) -> dict[str, Outcome]:
        """Every row on one item; ``"full"`` is the reference itself. ``gold``: score the gold answer too."""
        needed = {row.variant for row in wanted if row.reuse == "chunks"} | {"canonical"}
        for variant in sorted(needed):
            self.engine(variant).warm(item.passages)
        base = self.engine("canonical")
        holding = KVBoost(self.model, self.tokenizer, store=base.store, prefix_bytes=1 << 34)
        full = Reference(holding, item, self.style, self.max_new_tokens)
        out = {"full": self._reference_outcome(full, item)}
        for row in wanted:
            out[row.name] = self._outcome(row, item, full, gold)
        for variant in needed:
            self.engine(variant).store.clear()
        return out

    @staticmethod
    def _reference_outcome(full: Reference, item: Item) -> Outcome:
        return Outcome(
            agreement=1.0,
            same_text=1.0,
            nll_gold=full.gold.nll,
            f1=f1(full.text, item.answers),
            exact=exact_match(full.text, item.answers),
            forwarded=full.report.forwarded_tokens,
            repaired_share=1.0,
            ttft_s=full.report.ttft_s,
            text=full.text,
        )

    def _outcome(self, row: Row, item: Item, full: Reference, gold: bool) -> Outcome:
        engine = self.engine(row.variant)
        prompt = messages(item, passages=row.passages, style=self.style)
        options: dict[str, Any] = {"reuse": row.reuse, "repair": row.repair}
        if row.passages:
            options["chunks"] = list(item.passages)
        greedy = engine.score(prompt, full.token_ids, logits=True, **options)
        assert greedy.logits is not None
        same = agreement(full.logits, greedy.logits)
        text = full.text
        if same < 1:  # where every argmax agrees, the free run is the teacher-forced one
            text = engine.generate(prompt, max_new_tokens=self.max_new_tokens, **options).text
        along = kl(full.logits, greedy.logits)
        context = sum(c.num_tokens for c in greedy.report.chunks)
        over_gold: dict[str, float] = dict.fromkeys(("kl_gold", "nll_gold", "d_nll"), nan)
        if gold:
            scored = engine.score(prompt, item.answers[0], logits=True, **options)
            assert scored.logits is not None
            assert full.gold.logits is not None
            divergence = float(kl(full.gold.logits, scored.logits).mean())
            over_gold = {"kl_gold": divergence, "nll_gold": scored.nll, "d_nll": abs(scored.nll - full.gold.nll)}
        return Outcome(
            kl_first=float(along[0]),
            kl_greedy=float(along.mean()),
            agreement=same,
            same_text=float(text == full.text),
            **over_gold,
            f1=f1(text, item.answers),
            exact=exact_match(text, item.answers),
            forwarded=greedy.report.forwarded_tokens,
            repaired_share=greedy.report.repaired_tokens / context if context else 0.0,
            ttft_s=greedy.report.ttft_s,
            text=text,
        )


def run(
    bench: Bench,
    data: DataSet,
    wanted: Sequence[Row],
    *,
    quiet: bool = False,
    keep: Callable[[list[dict[str, Outcome]]], None] = lambda _: None,
) -> list[dict[str, Outcome]]:
    """Measure every item; progress on stderr. ``keep`` gets all results so far after each item."""
    results: list[dict[str, Outcome]] = []
    for number, item in enumerate(data.items, 1):
        results.append(bench.measure(item, wanted, gold=data.over == "gold"))
        keep(results)
        if not quiet:
            so_far = {r.name: fmean(getattr(x[r.name], f"kl_{data.over}") for x in results) for r in wanted}
            line = "  ".join(f"{name} {value:.4f}" for name, value in so_far.items())
            print(f"{number}/{len(data.items)} {item.id}  {line}", file=sys.stderr, flush=True)
    return results


def loader(name: str, device: str) -> Any:
    """A function that loads ``name`` in a given dtype: ``(model, tokenizer)``."""

    def load(dtype: str) -> tuple[Any, Any]:
        engine = KVBoost.from_pretrained(name, store=None, dtype=dtype, device=device, reuse="off")
        return engine.model, engine.tokenizer

    return load


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="name", default="squad", help="squad, musique, needle, multineedle, twohop, FILE")
    parser.add_argument("--n", type=int, default=20, help="items, evenly spaced over the set")
    parser.add_argument("--split", choices=SPLITS, default="all")
    parser.add_argument("--policies", default=DEFAULT, help="comma-separated rows (default: %(default)s)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--style", choices=("chat", "numbered"), default="chat", help="prompt format")
    parser.add_argument("--chunks", type=int, help="at most this many passages")
    parser.add_argument("--chunk-tokens", type=int, help="cut passages to this many tokens")
    parser.add_argument("--shuffle", action="store_true", help="permute the passages (with --seed)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--against", default="balanced", help="row that the paired differences are taken against")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of NAME_dev.jsonl")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's own choice)")
    parser.add_argument("--out", help="name of the result file under results/ (default: fidelity-SET-SPLIT)")
    parser.add_argument("--plot", type=Path, help="write fidelity against forwarded share ([plot] extra)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    wanted = rows(args.policies)
    bench = Bench(loader(args.model, args.device), style=args.style, max_new_tokens=args.max_new_tokens)
    shape = {"chunks": args.chunks, "chunk_tokens": args.chunk_tokens, "shuffle": args.shuffle}
    data = load_set(args.name, bench.tokenizer, n=args.n, split=args.split, seed=args.seed, data=args.data, **shape)
    settings = {k: v for k, v in vars(args).items() if k not in ("data", "plot", "out")}
    settings["name"] = Path(args.name).name
    name = args.out or f"fidelity-{Path(args.name).stem}-{args.split}"
    about = {"settings": settings, "environment": environment()}

    def keep(results: list[dict[str, Outcome]]) -> None:
        items = [i.id for i in data.items[: len(results)]]
        write_result(name, {**about, "items": items, **summary(results, data.over, against=args.against)})

    found = summary(run(bench, data, wanted, keep=keep), data.over, against=args.against)
    print(table(found))
    if args.plot:
        from fidelity_report import plot

        plot(found, args.plot)


if __name__ == "__main__":
    main()
