"""``kvboost-rag plan``: what of a model would lie where on a given GPU, and how fast that can be. Needs no GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from kvboost_rag.cli import common

if TYPE_CHECKING:
    from kvboost_rag.plan import Plan

# Sustained host-to-device rates in GB/s, for when none is given.
LINKS = ((6.0, "memory that cannot be pinned"), (12.5, "PCIe 3.0 x16, 4.0 x8"), (25.0, "PCIe 4.0 x16, 5.0 x8"),
         (52.0, "PCIe 5.0 x16"))  # fmt: skip


def _rate(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value:g} is no rate (for example 25)", ctx=ctx, param=param)
    return value


@click.command("plan")
@click.argument("model")
@click.option("--vram", required=True, metavar="SIZE", callback=common.parsed(common.parse_size), help="e.g. 8GiB.")
@click.option("--bandwidth", type=float, callback=_rate, metavar="GB/s", help="Host to device, sustained.")
@click.option("--context", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of KV.")
@click.option(
    "--kv-vram",
    metavar="SIZE",
    callback=common.parsed(common.parse_size),
    help="KV in pages of this size, the rest in host memory; instead of --context.",
)
@click.option(
    "--store-vram",
    metavar="SIZE",
    callback=common.parsed(common.parse_size),
    help="A tier of the block store on the GPU.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    callback=common.parsed(common.parse_size),
    help="Refuse where more is needed.  [default: not checked]",
)
@common.json_option
def command(
    model: str,
    vram: int,
    bandwidth: float | None,
    context: int,
    kv_vram: int | None,
    store_vram: int | None,
    host_memory: int | None,
    as_json: bool,
) -> None:
    """Plan MODEL (a folder, a config.json, a hub id, or a shape such as qwen2.5-32b-awq) for a budget of GPU memory.

    Predictions are upper bounds from the bytes that cross the bus for each token; nothing is loaded.
    """
    from kvboost_rag.plan import Budget, KVBudget, find_weights, make_plan, page_sizes

    weights = find_weights(model)
    pages = page_sizes(KVBudget(kv_vram), weights.kv_per_token, len(weights.layers)) if kv_vram is not None else None
    plan = make_plan(weights, Budget(vram=vram, context=context, held=store_vram or 0, kv=kv_vram, host=host_memory))
    kv = f"pages with KV of {pages.tokens} tokens" if pages else f"KV of {context} tokens"
    links = [(bandwidth, "given")] if bandwidth else LINKS
    if as_json:
        rates = [{"gb_per_s": rate, "tokens_per_s": plan.tokens_per_s(rate * 1e9)} for rate, _ in links]
        common.print_json({**plan.as_dict(), "predicted": rates})
        return
    _print_places(plan, kv)
    if not plan.seconds_per_token(1e9):
        click.echo("\nEverything fits: the bus does not limit decoding.")
        return
    click.echo("\nAt most, at batch 1:")
    for rate, what in links:
        click.echo(f"  {plan.tokens_per_s(rate * 1e9):6.2f} tokens/s at {rate:g} GB/s ({what})")


def _print_places(plan: Plan, kv: str) -> None:
    size, w = common.format_size, plan.weights
    click.echo(f"{w.name}: {size(w.total)} of weights, {len(w.layers)} layers; budget {size(plan.budget.vram)}")
    rows = [
        (f"{len(plan.resident)} resident layers", plan.resident_bytes),
        (f"{plan.slots} slots for {len(plan.streamed)} streamed layers", plan.slots * plan.slot_bytes),
        (f"output matrix{'' if plan.head_on_host else ' and norm'}{_embedding(plan)}", plan.dense_bytes),
        (kv, plan.kv_bytes),
        *([("blocks of the store", plan.budget.held)] if plan.budget.held else []),
        ("workspace", plan.budget.workspace),
        ("driver, display, libraries", plan.budget.reserve),
        ("GPU total", plan.device_bytes),
        ("host: streamed layers" + (", embedding" if plan.embed_on_host else "")
         + (", output matrix" if plan.head_on_host else ""), plan.host_bytes),
        ("over the bus per token", plan.streamed_bytes),
    ]  # fmt: skip
    for label, nbytes in rows:
        click.echo(f"  {label:<48} {size(nbytes):>10}")


def _embedding(plan: Plan) -> str:
    return "" if plan.embed_on_host else ", embedding"
