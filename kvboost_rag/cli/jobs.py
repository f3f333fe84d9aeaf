"""``--jobs N``: a warm-up as N processes, each with its own shard, and one report of them all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from threading import Thread

import click

from kvboost_rag.errors import UsageError
from kvboost_rag.warmup import InputProblem, WarmReport
from kvboost_rag.warmup.ingest import STDIN

PARENT = "KVBOOST_RAG_JOB_OF"  # environment of a job: the process id of its starter
CHILD_COMMAND = (sys.executable, "-m", "kvboost_rag")


def child_arguments(ctx: click.Context, leave_out: Collection[str]) -> list[str]:
    """The command line that the present invocation came from, paths first, without the options ``leave_out``.

    Raises:
        UsageError: the input is stdin, which several processes cannot share.
    """
    paths: Sequence[str] = ctx.params["paths"]
    if STDIN in paths:
        raise UsageError("several processes cannot share stdin", hint="write it to a file first")
    words: list[str] = []
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if not isinstance(param, click.Option) or param.name in leave_out or value is None:
            continue
        if param.multiple:
            words += [word for one in value for word in (param.opts[0], str(one))]
        elif param.is_flag:
            words += [param.opts[0]] if value else param.secondary_opts[:1]
        else:
            words += [param.opts[0], str(value)]
    return [*words, "--", *paths]


class Job:
    """One child. Its stderr is passed on line by line, its stdout is the report.

    Args:
        arguments: what follows ``warmup``.
        label: its shard, as ``2/8``.
        command: what to run; by default this very program.
        folder: where it works; by default here.
        secrets: of its environment, which the list of processes does not show.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        label: str,
        command: Sequence[str] = (),
        folder: str | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.label = label
        self.output = ""
        threads = str(max(1, (os.cpu_count() or 1) // int(label.partition("/")[2])))
        self.process = subprocess.Popen(
            [*(command or CHILD_COMMAND), "warmup", "--shard", label, "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            # A session of its own: Ctrl-C reaches it through us, once, and not a second time from the terminal.
            start_new_session=True,
            cwd=folder,
            env={
                "OMP_NUM_THREADS": threads,
                "TQDM_DISABLE": "1",
                **os.environ,
                **(secrets or {}),
                PARENT: str(os.getpid()),
            },
        )
        self.threads = [Thread(target=self._read_output, daemon=True), Thread(target=self._pass_on, daemon=True)]
        for thread in self.threads:
            thread.start()

    def _read_output(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stream:
            self.output = stream.read()

    def _pass_on(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stream:
            for line in stream:
                click.echo(f"[{self.label}] {line.rstrip()}", err=True)

    def wait(self) -> None:
        for thread in self.threads:
            thread.join()
        self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs. SIGTERM is treated like Ctrl-C by it; SIGINT may be ignored in the
        background of a shell."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def report(self, interrupted: bool) -> WarmReport:
        return report_of(self.label, self.output, self.process.returncode, interrupted)


def report_of(label: str, output: str, status: int, interrupted: bool = False) -> WarmReport:
    """The report of a job by what it printed, or by how it ended."""
    try:
        return WarmReport.from_dict(json.loads(output))
    except (ValueError, KeyError, TypeError):  # it ended before it could say anything
        if interrupted or status in (130, -signal.SIGINT, -signal.SIGTERM):
            return WarmReport(interrupted=True)
        return WarmReport(problems=[InputProblem(f"job {label}", None, f"ended with status {status}")])


def run_jobs(arguments: Sequence[str], count: int, secrets: Mapping[str, str] | None = None) -> WarmReport:
    """Run ``count`` shards as processes and merge their reports. Ctrl-C is handed on, and their reports awaited."""
    jobs: list[Job] = []
    interrupted = False
    try:
        try:
            for number in range(1, count + 1):
                jobs.append(Job(arguments, f"{number}/{count}", secrets=secrets))
            for job in jobs:
                job.wait()
        except KeyboardInterrupt:
            interrupted = True
            _signal(jobs, signal.SIGTERM)
            for job in jobs:
                job.wait()
    finally:  # a second Ctrl-C, or a process that could not be started
        _signal(jobs, signal.SIGKILL)
    report = WarmReport.merged(job.report(interrupted) for job in jobs)
    report.interrupted |= interrupted
    return report


def _signal(jobs: Sequence[Job], number: int) -> None:
    for job in jobs:
        job.signal(number)
