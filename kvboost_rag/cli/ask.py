"""``kvboost-rag ask``: retrieve chunks, answer from them, say which tokens were not prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvboost_rag.cli import common
from kvboost_rag.cli.retrieve import best_chunks
from kvboost_rag.cli.values import text_value
from kvboost_rag.config import REUSE_MODES
from kvboost_rag.errors import UsageError
from kvboost_rag.warmup import Corpus, SourceChunk, SplitOptions, unique

SYSTEM = "Answer the question from the passages. If they do not hold the answer, say that you do not know."

# Named in common.ANSWER_OPTIONS; what they give goes to the engine.
answer_options = common.options(
    click.option(
        "--on-low-fidelity",
        type=click.Choice(["warn", "repair", "full", "ignore"]),
        help="What to do where `verify` found that this reuse changes answers too much: warn, answer with more repair, "
        "by full prefill, or ignore it.  [default: warn]",
    ),
    click.option("--cost-model", is_flag=True, help="Prefill plainly where reuse would take longer on this machine."),
    click.option(
        "--spot-check",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        help="Compare this share of answers (1: every one) with full prefill afterwards, and say how far off.",
    ),
)


@click.command("ask")
@click.argument("question")
@click.argument("paths", nargs=-1, required=True, metavar="PATH…")
@common.engine_options
@answer_options
@common.corpus_options
@click.option("--k", "count", type=click.IntRange(min=1), default=4, show_default=True, help="Chunks to answer from.")
@click.option("--retriever", type=click.Choice(["bm25"]), default="bm25", show_default=True)
@click.option("--system", default=SYSTEM, metavar="TEXT|@FILE", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Length of the answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="For sampling.")
@click.option("--reuse", type=click.Choice(REUSE_MODES), help="What may be reused.  [default: chunks]")
@click.option("--repair", help="fast, balanced or faithful.  [default: balanced]")
@click.option("--stream", is_flag=True, help="Print the answer as it comes.")
@common.json_option
def command(question: str, paths: tuple[str, ...], **params: Any) -> None:
    """Answer QUESTION from the documents below PATH….

    The documents are split as by warmup (give the same --chunk-size and --chunk-overlap), the best chunks are found
    with BM25, and their stored blocks are put together instead of being prefilled. The answer goes to stdout, what was
    reused to stderr.

    \b
    kvboost-rag ask "How are blocks stored?" docs/ --store ~/kv
    kvboost-rag ask "How are blocks stored?" docs/ --store ~/kv --json | jq .report
    """
    if params["stream"] and params["as_json"]:
        raise UsageError("--stream and --json exclude each other", hint="--json prints one object at the end")
    options = common.EngineOptions.take(params)
    system = text_value(params["system"]) or ""
    corpus = Corpus(paths, split=SplitOptions(params["chunk_size"], params["chunk_overlap"]), skip_unknown=True)
    chunks = best_chunks(question, list(unique(corpus)), params["count"])
    common.list_problems(corpus.problems, {})
    if not chunks:
        raise UsageError(
            "no text found to answer from", hint="name files or folders with .txt, .md, .html, .pdf, .jsonl"
        )
    with common.engine_for(options) as engine:
        result = _answer(engine, messages(question, chunks, system), chunks, params)
        if not params["as_json"]:
            _print_report(chunks, result)
        spot = _spot_check(engine) if options.answers.get("spot_check") else None
    if params["as_json"]:
        common.print_json(_as_dict(question, chunks, result) | ({"spot_check": spot} if spot else {}))
    elif spot:
        click.echo(_spot_line(spot), err=True)


def messages(question: str, chunks: Sequence[SourceChunk], system: str = SYSTEM) -> list[dict[str, str]]:
    """Chat messages: the instruction, then the chunks' exact texts and the question."""
    passages = "\n\n".join(chunk.text for chunk in chunks)
    user = {"role": "user", "content": f"{passages}\n\nQuestion: {question}"}
    return [{"role": "system", "content": system}, user] if system else [user]


def _answer(engine: Any, prompt: list[dict[str, str]], chunks: Sequence[SourceChunk], params: dict[str, Any]) -> Any:
    """Generate, print the answer where it is not part of a JSON object, and return the result."""
    settings = {
        "max_new_tokens": params["max_tokens"],
        "temperature": params["temperature"],
        "seed": params["seed"],
        "chunks": [chunk.text for chunk in chunks],
        "reuse": params["reuse"],
        "repair": params["repair"],
    }
    if not params["stream"]:
        result = engine.generate(prompt, **settings)
        if not params["as_json"]:
            click.echo(result.text)
        return result
    result = None
    for piece in engine.stream(prompt, **settings):
        click.echo(piece.text, nl=False)
        result = piece.result
    click.echo()
    return result


def _print_report(chunks: Sequence[SourceChunk], result: Any) -> None:
    click.echo("", err=True)
    for number, chunk in enumerate(chunks):
        click.echo(f"chunk {number}: {_place(chunk)}", err=True)
    click.echo(result.report.table(), err=True)


def _spot_check(engine: Any) -> dict[str, Any]:
    """Wait for the comparison with full prefill that the answer may have started; its figures."""
    engine.engine.spot.wait()
    found: dict[str, Any] = engine.stats(sizes=False)["spot"]
    return found


def _spot_line(spot: dict[str, Any]) -> str:
    if spot["errors"]:
        return "spot check: the comparison with full prefill failed (it needs room for the KV of one more prompt)"
    if not spot["checked"]:
        return "spot check: not compared (the answer is exact, or not in the share)"
    return (
        f"spot check: against full prefill the mean KL is {spot['mean_kl']:.3f} nats, "
        f"the most likely token the same in {spot['agreement']:.0%} of the answer"
    )


def _place(chunk: SourceChunk) -> str:
    return f"{chunk.source}:{chunk.line}" if chunk.line is not None else chunk.source


def _as_dict(question: str, chunks: Sequence[SourceChunk], result: Any) -> dict[str, object]:
    return {
        "question": question,
        "answer": result.text,
        "finish_reason": result.finish_reason,
        "sources": [{"source": chunk.source, "line": chunk.line, "id": chunk.id} for chunk in chunks],
        "report": result.report.as_dict(),
    }
