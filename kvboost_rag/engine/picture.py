"""A report as a picture: the prompt as coloured spans, in HTML (notebooks) or as a matplotlib figure.

Colours: reused (taken from a block), held (from a held prefix), repaired, forwarded (glue and question), missed.
"""

from __future__ import annotations

from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

from kvboost_rag.errors import MissingExtraError

if TYPE_CHECKING:
    from kvboost_rag.engine.report import Report

COLOURS = {
    "reused": "#8fd19e",
    "held": "#9ecae1",
    "repaired": "#fdae6b",
    "forwarded": "#bdbdbd",
    "missed": "#e66a6a",
}
_OF_OUTCOME = {"hit": "reused", "prefix": "held", "miss": "missed"}


def spans(report: Report) -> list[tuple[int, int, str, str]]:
    """``(start, end, kind, text)`` covering the whole prompt, in order; glue in a held prefix counts as held."""
    out: list[tuple[int, int, str, str]] = []
    at = 0
    for c in report.chunks:
        out += _glue(at, c.start, report.prefix_tokens)
        out.append((c.start, c.end, _OF_OUTCOME.get(c.outcome, "missed"), c.text))
        at = c.end
    return out + _glue(at, report.prompt_tokens, report.prefix_tokens)


def _glue(start: int, end: int, held: int) -> list[tuple[int, int, str, str]]:
    middle = min(max(start, held), end)
    parts = [(start, middle, "held", ""), (middle, end, "forwarded", "")]
    return [p for p in parts if p[1] > p[0]]


def report_html(report: Report) -> str:
    """Self-contained HTML: a bar of spans, a legend, the numbers and the chunks."""
    n = max(1, report.prompt_tokens)
    bar = "".join(
        f'<div title="{escape(kind)} [{a}, {b}) {escape(text)}" style="position:absolute;left:{100 * a / n:.3f}%;'
        f'width:{100 * (b - a) / n:.3f}%;height:28px;background:{COLOURS[kind]};border-right:1px solid #fff"></div>'
        for a, b, kind, text in spans(report)
    )
    marks = "".join(
        f'<div style="position:absolute;left:{100 * p / n:.3f}%;width:{max(0.15, 100 / n):.3f}%;height:28px;'
        f'background:{COLOURS["repaired"]}"></div>'
        for p in report.repaired_positions
    )
    legend = " ".join(
        f'<span style="background:{colour};padding:0 6px;border-radius:3px">{kind}</span>'
        for kind, colour in COLOURS.items()
    )
    rows = "".join(
        f"<tr><td>{i}</td><td>[{c.start}, {c.end})</td><td>{escape(c.outcome)}</td><td>{c.repaired_tokens}</td>"
        f"<td>{escape(c.reason)}</td><td>{escape(c.text)}</td></tr>"
        for i, c in enumerate(report.chunks)
    )
    return (
        '<div style="font-family:sans-serif;font-size:13px;max-width:900px">'
        f'<div style="position:relative;height:28px;background:#eee">{bar}{marks}</div>'
        f'<div style="margin:4px 0">{legend}</div><div>{escape(headline(report))}</div>'
        f'<table style="font-size:12px"><tr><th></th><th>tokens</th><th>outcome</th><th>repaired</th><th>why</th>'
        f"<th>text</th></tr>{rows}</table></div>"
    )


def headline(report: Report) -> str:
    """One line of numbers."""
    n = max(1, report.prompt_tokens)
    kind = "exact" if report.exact else "approximate"
    return (
        f"{report.prompt_tokens} prompt tokens: {report.reused_tokens} reused ({report.reused_tokens / n:.0%}), "
        f"{report.repaired_tokens} repaired, {report.forwarded_tokens:.0f} forwarded · first token after "
        f"{1e3 * report.ttft_s:.0f} ms · {kind}"
    )


def report_plot(report: Report, path: str | None = None) -> Any:
    """The same bar as a matplotlib figure; written to ``path`` (PNG or SVG by its suffix) if given.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingExtraError("plot needs matplotlib", hint="pip install 'kvboost-rag[plot]'") from error
    figure = Figure(figsize=(10, 1.9), layout="constrained")
    axes = figure.subplots()
    for a, b, kind, _ in spans(report):
        axes.barh(0, b - a, left=a, color=COLOURS[kind], edgecolor="white", linewidth=0.5)
    axes.barh([0] * len(report.repaired_positions), 1, left=report.repaired_positions, color=COLOURS["repaired"])
    axes.set_yticks([])
    axes.set_xlim(0, max(1, report.prompt_tokens))
    axes.set_xlabel("token position")
    axes.set_title(headline(report), fontsize=9)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize=8, frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]  # draws itself without pyplot, too
    return figure


def _png(figure: Any) -> bytes:
    """``figure`` as a notebook shows it."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()
