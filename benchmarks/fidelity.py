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
from fidelity_policies import DEFAULT, Outcome, Row, engine_options, is_made, rows
from fidelity_report import summary, table
from fidelity_ways import EngineWay, RivalWay, Way, nll
from rival_blocks import RivalBlocks
from rival_prompt import Laid, Spans, spans_of

from kvboost_rag import KVBoost, Repair

MAX_NEW_TOKENS = 24
QUIET: dict[str, Any] = {"on_low_fidelity": "ignore"}  # verifying is what happens here


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
            options = {"prefix_bytes": 0, "memory_bytes": 4 << 30, **QUIET, **engine_options(variant)}
            self._engines[variant] = KVBoost(model, self.tokenizer, store="memory", **options)
        return self._engines[variant]

    def measure(
        self, item: Item, wanted: Sequence[Row], *, gold: bool = True, other: Sequence[str] = ()
    ) -> dict[str, Outcome]:
        """Every row on one item; ``"full"`` is the reference itself. ``gold``: score the gold answer too. ``other``:
        passages of another item, for what a warm-up learns elsewhere."""
        needed = {row.variant for row in wanted if row.reuse == "chunks"} | {"canonical"}
        for variant in sorted(v for v in needed if not is_made(v)):
            self.engine(variant).warm(item.passages)
        base = self.engine("canonical")
        holding = KVBoost(self.model, self.tokenizer, store=base.store, prefix_bytes=1 << 34, **QUIET)
        full = Reference(holding, item, self.style, self.max_new_tokens)
        self._make_blocks(item, sorted(v for v in needed if is_made(v)), other, full)
        out = {"full": self._reference_outcome(full, item)}
        for row in wanted:
            out[row.name] = self._outcome(row, item, full, gold)
        for variant in needed:
            self.engine(variant).store.clear()
        return out

    def _make_blocks(self, item: Item, variants: Sequence[str], other: Sequence[str], full: Reference) -> None:
        if variants:
            made = RivalBlocks(self.engine(variants[0]), item, other, self._spans(item, full), self.style)
            for variant in variants:
                made.fill(self.engine(variant).store, variant)

    def _spans(self, item: Item, full: Reference) -> Spans:
        return spans_of(self.engine("canonical"), messages(item, style=self.style), item.passages, full.report)

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
        way: Way = (
            self._laid(row, item, full) if row.method else EngineWay(self.engine(row.variant), row, item, self.style)
        )
        greedy = way.logits(full.token_ids)
        same = agreement(full.logits, greedy)
        # Where every argmax agrees, the free run is the teacher-forced one.
        text = full.text if same == 1 else way.text(self.max_new_tokens)
        along = kl(full.logits, greedy)
        over_gold: dict[str, float] = dict.fromkeys(("kl_gold", "nll_gold", "d_nll"), nan)
        if gold:
            scored = way.logits(full.gold.token_ids)
            assert full.gold.logits is not None
            of_gold = nll(scored, full.gold.token_ids)
            divergence = float(kl(full.gold.logits, scored).mean())
            over_gold = {"kl_gold": divergence, "nll_gold": of_gold, "d_nll": abs(of_gold - full.gold.nll)}
        return Outcome(
            kl_first=float(along[0]),
            kl_greedy=float(along.mean()),
            agreement=same,
            same_text=float(text == full.text),
            **over_gold,
            f1=f1(text, item.answers),
            exact=exact_match(text, item.answers),
            forwarded=way.forwarded,
            repaired_share=way.repaired_share,
            ttft_s=way.ttft_s,
            text=text,
        )

    def _laid(self, row: Row, item: Item, full: Reference) -> Way:
        assert row.method is not None
        engine = self.engine(row.variant)
        held = [engine.store.get(key) for key in engine.store.keys()]  # noqa: SIM118 - a store is not a dict
        by_ids = {tuple(b.token_ids): b for b in held}
        spans = self._spans(item, full)
        blocks = [by_ids[spans.token_ids[start:end]] for start, end in spans.chunks]
        room = max(self.max_new_tokens, len(full.gold.token_ids), len(full.token_ids))
        return RivalWay(Laid(engine, spans, blocks, row.method, room=room))


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
        other = data.items[number % len(data.items)].passages if len(data.items) > 1 else ()
        results.append(bench.measure(item, wanted, gold=data.over == "gold", other=other))
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
