"""How far the KV of stored blocks is from what the prompt makes of the same tokens: by layer and position in the chunk.

    python benchmarks/deviation.py --set musique --n 4 --plot docs/fidelity-deviation.png

Deviation is ``‖block - prompt‖ / ‖prompt‖`` over heads, keys before rotation, as the root of the ratio of mean squares.
It says where reuse errs, not what that costs in answers: that is benchmarks/fidelity.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import environment, write_result
from fidelity_data import DEFAULT_DATA, SPLITS, Item, load_set, messages
from fidelity_policies import VARIANTS

from kvboost_rag import KVBoost

BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # of the position in the chunk: [0, 1), [1, 2), [2, 4), … from 128 on
COMPARED = ("alone", "head", "canonical")


def prompt_ids(engine: KVBoost, item: Item, chunks: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Token ids of the item's prompt, span by span, and where each chunk starts."""
    text, ids, starts = engine.render(messages(item)), [], []

    def glue(part: str) -> list[int]:
        return list(engine.tokenizer(part, add_special_tokens=False).input_ids)

    for passage, chunk in zip(item.passages, chunks, strict=True):
        before, text = text.split(passage.strip(), 1)
        ids += glue(before)
        starts.append(len(ids))
        ids += chunk
    return ids + glue(text), starts


def true_kv(engine: KVBoost, ids: list[int]) -> torch.Tensor:
    """Full prefill's KV, keys before rotation: ``[num_layers, 2, num_kv_heads, n, head_dim]``."""
    tokens = torch.tensor(ids)
    cache = engine.adapter.new_cache(len(ids))
    engine.adapter.forward(tokens, torch.arange(len(ids)), cache)
    kv = cache.kv.clone()
    kv[:, 0] = engine.adapter.rope.unrotate(cache.kv[:, 0], 0)
    return kv


def blocks(engine: KVBoost, item: Item) -> list[Any]:
    """The item's blocks, in the order of its passages."""
    engine.store.clear()
    engine.warm(item.passages)
    held = [engine.store.get(key) for key in engine.store.keys()]  # noqa: SIM118 - a store is not a dict
    by_ids = {tuple(b.token_ids): b for b in held}
    return [by_ids[tuple(engine.tokenizer(p.strip(), add_special_tokens=False).input_ids)] for p in item.passages]


class Sums:
    """Sums of squares by variant: ``[num_layers, 2 (K, V), bins]``, of the difference and of the truth."""

    def __init__(self, layers: int) -> None:
        self.wrong = torch.zeros(layers, 2, len(BINS))
        self.right = torch.zeros(layers, 2, len(BINS))

    def add(self, stale: torch.Tensor, true: torch.Tensor) -> None:
        """One chunk: ``[num_layers, 2, num_kv_heads, n, head_dim]`` both."""
        where = torch.bucketize(torch.arange(true.shape[3]), torch.tensor(BINS), right=True) - 1
        for target, squares in ((self.wrong, (stale - true).square()), (self.right, true.square())):
            target.index_add_(2, where, squares.sum((2, 4)))

    def deviation(self) -> torch.Tensor:
        return (self.wrong / self.right.clamp_min(1e-12)).sqrt()


def measure(model: str, items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Deviation by variant, ``[num_layers, 2, bins]``."""
    first = KVBoost.from_pretrained(model, store="memory", dtype="float32", prefix_bytes=0)
    engines = {v: KVBoost(first.model, first.tokenizer, store="memory", **VARIANTS[v]) for v in COMPARED}
    sums = {v: Sums(first.adapter.spec.num_layers) for v in COMPARED}
    for number, item in enumerate(items, 1):
        stale = {v: blocks(engines[v], item) for v in COMPARED}
        chunks = [tuple(b.token_ids) for b in stale["alone"]]
        ids, starts = prompt_ids(first, item, chunks)
        true = true_kv(first, ids)
        for variant, held in stale.items():
            for block, start in list(zip(held, starts, strict=True))[1:]:  # the first chunk has no chunk before it
                sums[variant].add(block.kv, true[:, :, :, start : start + len(block.token_ids)])
        print(f"{number}/{len(items)} {item.id}", file=sys.stderr, flush=True)
    return {v: s.deviation() for v, s in sums.items()}


def plot(found: dict[str, torch.Tensor], path: Path) -> None:
    """One picture per variant, keys above values: layer against position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(3.2 * len(found), 5.6), sharex=True, sharey=True, squeeze=False)
    top = max(float(d.max()) for d in found.values())
    for column, (variant, deviation) in enumerate(found.items()):
        for kind, name in enumerate(("keys", "values")):
            panel = axes[kind][column]
            image = panel.imshow(
                deviation[:, kind], origin="lower", aspect="auto", vmin=0, vmax=min(top, 1.0), cmap="viridis"
            )
            panel.set_title(f"{variant}: {name}", fontsize=9)
            panel.set_xticks(range(len(BINS)), [str(b) for b in BINS], fontsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("position in chunk, from", fontsize=8)
    for row in axes:
        row[0].set_ylabel("layer", fontsize=8)
    figure.colorbar(image, ax=axes, label="‖block - prompt‖ / ‖prompt‖", shrink=0.8)
    figure.savefig(path, dpi=90, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="name", default="musique")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--split", choices=SPLITS, default="held")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = KVBoost.from_pretrained(args.model, store=None, reuse="off").tokenizer
    data = load_set(args.name, tokenizer, n=args.n, split=args.split, data=args.data)
    found = measure(args.model, data.items)
    rows = {v: {k: [[round(x, 3) for x in layer] for layer in d[:, i].tolist()] for i, k in enumerate("kv")}
            for v, d in found.items()}  # fmt: skip
    about = {"set": args.name, "split": args.split, "n": args.n, "model": args.model, "position_bins": BINS}
    name = f"deviation-{Path(args.name).stem}-{args.split}"
    write_result(name, {"environment": environment(), **about, "by_layer_and_bin": rows})
    for variant, d in found.items():
        for kind, label in enumerate(("keys", "values")):
            print(f"{variant:10} {label:7}", " ".join(f"{x:.2f}" for x in d[:, kind].mean(0).tolist()))
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
