"""A verification as one self-contained page: no script, no outside file."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_rag.verify.report import ItemCheck, TokenCheck, VerifyReport

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
.ok{border-left:6px solid #3a9d5d;padding-left:1em}.bad{border-left:6px solid #c8453b;padding-left:1em}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}.item{margin:1.4em 0;padding-top:.6em;border-top:1px solid #ddd}
.answer{white-space:pre-wrap;font-family:ui-monospace,monospace;background:#fafafa;padding:.5em;margin:.2em 0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 1em}
.other{text-decoration:underline wavy #c8453b}.small{color:#666;font-size:13px}
"""
WORST_KL = 1.0  # nats that get the full colour


def report_html(report: VerifyReport) -> str:
    """The page of ``report``."""
    rows = [
        ("questions", f"{len(report.items)}"),
        ("answers that read differently", f"{len(report.changed)}"),
        ("answer tokens with the same choice", f"{report.agreement:.1%}"),
        ("mean KL of the first token, nats", f"{report.kl_first:.4f}"),
        ("mean KL over the answers, nats", f"{report.kl:.4f}"),
        ("prompt tokens forwarded", f"{report.forwarded_share:.1%}"),
        ("time to first token, full prefill (median)", f"{1e3 * report.full_ttft_s:.0f} ms"),
        ("time to first token, reuse (median)", f"{1e3 * report.reuse_ttft_s:.0f} ms"),
    ]
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    notes = "".join(f"<p class=small>{escape(note)}</p>" for note in report.notes)
    items = "".join(_item(i) for i in sorted(report.items, key=lambda i: -i.kl))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvboost-rag verify</title><style>{STYLE}</style>"
        f"<h1>Reuse against full prefill</h1><p>{escape(report.model)}, repair={escape(report.policy)}</p>"
        f'<p class="{"ok" if report.ok else "bad"}">{escape(report.verdict)}</p><table>{table}</table>{notes}'
        f"<p class=small>Full prefill's answer, token by token: the redder, the larger the KL there; underlined: reuse "
        f"would have chosen another token (hover to see it). Largest KL first.</p>{items}</html>\n"
    )


def _item(item: ItemCheck) -> str:
    answer = f"<div class=answer>{''.join(_token(t) for t in item.tokens) or escape(item.full_text)}</div>"
    if item.changed:
        answer = (
            f"<div class=pair><div class=small>full prefill</div><div class=small>reuse</div>{answer}"
            f"<div class=answer>{escape(item.reuse_text)}</div></div>"
        )
    warnings = "".join(f"<div class=small>{escape(w)}</div>" for w in item.warnings)
    return (
        f"<div class=item><b>{escape(item.question)}</b>"
        f"<div class=small>KL {item.kl:.4f}, first token {item.kl_first:.4f}, agreement {item.agreement:.0%}, "
        f"forwarded {item.forwarded_tokens:.0f} of {item.prompt_tokens} tokens, "
        f"{1e3 * item.full_ttft_s:.0f} → {1e3 * item.reuse_ttft_s:.0f} ms</div>"
        f"{answer}{warnings}</div>"
    )


def _token(token: TokenCheck) -> str:
    strength = min(1.0, math.sqrt(max(0.0, token.kl) / WORST_KL))
    title = f"KL {token.kl:.4f}" + (f", reuse: {token.other!r}" if token.other else "")
    kind = " class=other" if token.other else ""
    colour = f"rgba(200,69,59,{0.6 * strength:.2f})"
    return f'<span{kind} style="background:{colour}" title="{escape(title)}">{escape(token.text)}</span>'
