"""Summaries of a fidelity run: the json that is committed, the table that people read, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from fidelity_metrics import bootstrap, gap_recovered, paired_bootstrap
from fidelity_policies import Outcome

NUMBERS = [f.name for f in fields(Outcome) if f.name != "text"]
WITH_INTERVAL = ("kl_first", "kl_greedy", "kl_gold", "agreement", "d_nll", "nll_gold", "f1")


def summary(results: Sequence[dict[str, Outcome]], over: str, *, against: str = "") -> dict[str, Any]:
    """Per row: means, 95 % intervals, gap recovered, and the paired KL difference to the row ``against``.

    ``over`` names the KL that judges this set (``"gold"`` or ``"greedy"``).
    """
    names = list(results[0])
    return {
        "n": len(results),
        "kl_over": over,
        "rows": {name: _row(results, name, over, against if against in names else "") for name in names},
        "texts": [{name: outcome.text for name, outcome in item.items()} for item in results],
    }


def _row(results: Sequence[dict[str, Outcome]], name: str, over: str, against: str) -> dict[str, Any]:
    values = {field: [float(getattr(item[name], field)) for item in results] for field in NUMBERS}
    values = {field: v for field, v in values.items() if not any(map(isnan, v))}  # NaN: not measured on this set
    row: dict[str, Any] = {field: round(fmean(v), 5) for field, v in values.items()}
    row["ci95"] = {
        field: [round(x, 5) for x in bootstrap(values[field])[1:]] for field in WITH_INTERVAL if field in values
    }
    full = [item["full"].forwarded for item in results]
    row["forwarded_share"] = round(fmean(a / b for a, b in zip(values["forwarded"], full, strict=True)), 4)
    if "no-context" in results[0]:
        row |= {f"gap_{field}": _gap(results, name, field) for field in ("nll_gold", "f1") if field in values}
    if against and name != against:
        other = [getattr(item[against], f"kl_{over}") for item in results]
        mean, low, high = paired_bootstrap(values[f"kl_{over}"], other)
        row["kl_minus_" + against] = [round(x, 5) for x in (mean, low, high)]
    row["per_item_kl"] = [round(x, 5) for x in values[f"kl_{over}"]]
    return row


def _gap(results: Sequence[dict[str, Outcome]], name: str, field: str) -> float | None:
    none, method, full = (fmean(getattr(item[n], field) for item in results) for n in ("no-context", name, "full"))
    gap = gap_recovered(none, method, full)
    return None if gap is None else round(gap, 4)


def table(found: dict[str, Any]) -> str:
    """A plain-text table; the interval is of the KL that judges the set."""
    over = found["kl_over"]
    head = (
        f"{'policy':22} {'KL ' + over:>9} {'95 %':>17} {'KL first':>8} {'KL greedy':>9} {'KL gold':>8} {'agree':>6} "
        f"{'same':>5} {'|dNLL|':>7} {'gap NLL':>7} {'F1':>5} {'repaired':>8} {'forward':>7} {'TTFT':>7}"
    )
    lines = [f"n={found['n']}", head]
    for name, r in found["rows"].items():
        low, high = r["ci95"][f"kl_{over}"]
        gap = r.get("gap_nll_gold")
        lines.append(
            f"{name:22} {r[f'kl_{over}']:9.4f} {f'[{low:.4f}, {high:.4f}]':>17} {r['kl_first']:8.4f} "
            f"{r['kl_greedy']:9.4f} {r.get('kl_gold', nan):8.4f} {r['agreement']:6.3f} {r['same_text']:5.2f} "
            f"{r.get('d_nll', nan):7.3f} {'' if gap is None else f'{gap:.3f}':>7} {r['f1']:5.2f} "
            f"{r['repaired_share']:8.3f} {r['forwarded_share']:7.3f} {1e3 * r['ttft_s']:5.0f}ms"
        )
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """KL against the share of tokens forwarded, one point per row, log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    over = found["kl_over"]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, r in found["rows"].items():
        if name in ("full", "no-context") or r[f"kl_{over}"] <= 0:
            continue
        low, high = r["ci95"][f"kl_{over}"]
        y = r[f"kl_{over}"]
        axes.errorbar(r["forwarded_share"], y, yerr=[[max(0, y - low)], [max(0, high - y)]], fmt="o", capsize=3)
        axes.annotate(name, (r["forwarded_share"], y), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("forwarded tokens, share of full prefill")
    axes.set_ylabel(f"mean KL(full ‖ policy), nats, over the {over} answer")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
