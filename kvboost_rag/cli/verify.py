"""``kvboost-rag verify``: what reuse changes in the answers to your own questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvboost_rag.cli import common
from kvboost_rag.cli.values import text_value
from kvboost_rag.errors import UsageError

if TYPE_CHECKING:
    from kvboost_rag.verify import VerifyReport


@click.command("verify")
@click.argument("questions", metavar="QUESTIONS.jsonl", type=click.Path(exists=True, dir_okay=False))
@common.engine_options
@click.option("--repair", help="fast, balanced or faithful.  [default: balanced]")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many questions.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Length of the answers.")
@click.option("--system", metavar="TEXT|@FILE", help="System prompt, for lines with question and passages.")
@click.option("--max-kl", type=click.FloatRange(min=0), default=0.1, show_default=True, help="Threshold, in nats.")
@click.option(
    "--min-agreement", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Threshold, a share."
)
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Also write a page with coloured answers."
)
@click.option("--keep/--no-keep", default=True, show_default=True, help="Keep the verdict in the store, for engines.")
@common.json_option
@click.option("--progress/--no-progress", default=True, help="Progress on stderr.")
def command(questions: str, **params: Any) -> None:
    """Answer every question of QUESTIONS.jsonl twice, with reuse and by full prefill, and compare.

    Each line has "question" and "passages", or "messages" (or "prompt") and "chunks". Blocks that the store lacks are
    computed first, and the verdict is kept in the store, in place of an earlier one on the same policy. Exit status 1
    if the mean KL is above --max-kl or the agreement below --min-agreement.

    \b
    kvboost-rag verify questions.jsonl --store ~/kv
    kvboost-rag verify questions.jsonl --store ~/kv --repair faithful --html verify.html --json
    """
    from kvboost_rag.verify import read_items
    from kvboost_rag.verify.items import SYSTEM

    options = common.EngineOptions.take(params)
    system = text_value(params["system"])
    if params["html"] and not Path(params["html"]).expanduser().parent.is_dir():
        raise _unwritable(params["html"], "there is no such folder")
    items = read_items(questions, params["limit"], SYSTEM if system is None else system)
    with common.engine_for(options) as engine:
        report = engine.verify(
            items,
            policy=params["repair"],
            max_new_tokens=params["max_tokens"],
            max_kl=params["max_kl"],
            min_agreement=params["min_agreement"],
            progress=_progress if params["progress"] else None,
            keep=params["keep"],
        )
    if params["as_json"]:
        common.print_json(report.as_dict())
    else:
        click.echo(report.table())
        if report.kept:
            click.echo("The store keeps this verdict: engines over it know it (on_low_fidelity).", err=True)
    if params["html"]:
        _write(params["html"], report)
    raise click.exceptions.Exit(0 if report.ok else 1)


def _progress(done: int, total: int) -> None:
    click.echo(f"\r{done}/{total} questions", err=True, nl=done == total)


def _write(path: str, report: VerifyReport) -> None:
    try:
        Path(path).expanduser().write_text(report.html(), encoding="utf-8")
    except OSError as exc:
        raise _unwritable(path, exc) from exc


def _unwritable(path: str, why: object) -> UsageError:
    return UsageError(f"{path} cannot be written: {why}", hint="--html FILE in a folder that exists")
