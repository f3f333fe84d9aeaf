"""The command line. Thin: parse, call, print; the answer goes to stdout, the talk to stderr.

Exit status: 0 done, 1 something went wrong or some inputs were bad, 2 the call itself was wrong, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os

import click

from kvboost_rag import __version__
from kvboost_rag.errors import KVBoostError, UsageError

# Each command's module holds it under the name ``command`` and is imported when it is needed.
COMMANDS = {
    "ask": "kvboost_rag.cli.ask",
    "plan": "kvboost_rag.cli.plan",
    "store": "kvboost_rag.cli.store",
    "verify": "kvboost_rag.cli.verify",
    "warmup": "kvboost_rag.cli.warmup",
}


class LazyGroup(click.Group):
    """Commands loaded by name, and our errors as one line instead of a traceback (KVBOOST_DEBUG=1 brings it back)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KVBoostError as exc:
            if os.environ.get("KVBOOST_DEBUG"):
                raise
            click.echo(f"error: {exc}", err=True)
            raise click.exceptions.Exit(2 if isinstance(exc, UsageError) else 1) from exc
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(130) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvboost-rag")
def main() -> None:
    """Reuse the KV cache of document chunks, at any position and in any order.

    \b
    kvboost-rag warmup docs/ --store ~/kv          compute and store every chunk once
    kvboost-rag ask "How do I …?" docs/ --store ~/kv   answer from the stored chunks
    kvboost-rag verify questions.jsonl --store ~/kv    what reuse changes in the answers
    kvboost-rag store stats --store ~/kv           what is there
    """
