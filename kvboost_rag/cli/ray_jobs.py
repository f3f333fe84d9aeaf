"""``--ray``: a warm-up as tasks of a Ray cluster, each with its own shard, all into one store.

A task runs the same command on its node that a person would run there, so what it needs is what that person would need:
this package, the corpus under the same path, and the store. Whatever a lost node had stored stays: Ray starts its task
elsewhere, and that skips what is there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import click

from kvboost_rag.cli.jobs import Job, report_of
from kvboost_rag.errors import MissingExtraError, UsageError
from kvboost_rag.warmup import InputProblem, WarmReport

CHILD_COMMAND: tuple[str, ...] = ()  # what a node runs; its own Python and this package, unless a test says otherwise
_RETRIES = 3  # of a task whose node was lost
_GRACE_S = 60.0  # how long Ctrl-C waits for the tasks' reports


@dataclass(frozen=True, slots=True)
class Share:
    """What one task asks of its node."""

    count: int  # tasks
    cpus: float
    gpus: int


def run_on_ray(
    arguments: Sequence[str], count: int | None, *, local_store: bool, secrets: Mapping[str, str] | None = None
) -> WarmReport:
    """Run the shards of a warm-up as tasks of the cluster at ``RAY_ADDRESS``, or of one on this machine, and merge
    their reports. Ctrl-C is handed on.

    Args:
        arguments: of ``warmup``, without those that share the work.
        count: shards; None for one per GPU, or one per node where there are none.
        local_store: whether the store is a folder, which nodes do not share.
        secrets: of the tasks' environment.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: several nodes, and a store that they do not share.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(f"--ray needs Ray: {error}", hint="pip install 'kvboost-rag[ray]'") from None
    with redirect_stdout(sys.stderr):  # Ray talks on both; ours is for the answer
        return _connected(ray, arguments, count, local_store, dict(secrets or {}))


def _connected(
    ray: Any, arguments: Sequence[str], count: int | None, local_store: bool, secrets: dict[str, str]
) -> WarmReport:
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=True, include_dashboard=False if "RAY_ADDRESS" not in os.environ else None)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if local_store and len(nodes) > 1:
            hint = "--store redis://…, s3://… or file:///shared/folder"
            raise UsageError(f"the {len(nodes)} nodes of the cluster share no folder of blocks", hint=hint)
        return _run(ray, arguments, share_of(nodes, count), secrets)
    finally:
        if ours:
            ray.shutdown()


def share_of(nodes: Sequence[dict[str, float]], count: int | None) -> Share:
    """How the work is cut, so that every task finds a node and a node's tasks fill it.

    Args:
        nodes: the resources of each, as Ray names them.
        count: shards, if their number was given.
    """
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    workers = [node for node, own in zip(nodes, gpus, strict=True) if node.get("CPU") and (own or not any(gpus))]
    tasks = count or sum(gpus) or max(1, len(workers))
    if any(gpus):
        return Share(tasks, 1.0, 1)
    per_node = -(-tasks // max(1, len(workers)))
    least = min((node["CPU"] for node in workers), default=1.0)
    return Share(tasks, float(max(1, int(least // per_node))), 0)


def _run(ray: Any, arguments: Sequence[str], share: Share, secrets: dict[str, str]) -> WarmReport:
    click.echo(f"{share.count} shards on Ray, {share.cpus:g} CPUs and {share.gpus} GPUs each", err=True)
    task = ray.remote(run_shard).options(
        num_cpus=share.cpus, num_gpus=share.gpus, max_retries=_RETRIES, scheduling_strategy="SPREAD"
    )
    labels = [f"{number}/{share.count}" for number in range(1, share.count + 1)]
    tasks = [task.remote(label, list(arguments), CHILD_COMMAND, os.getcwd(), secrets) for label in labels]
    interrupted = False
    try:
        ray.wait(tasks, num_returns=len(tasks))
    except KeyboardInterrupt:
        interrupted = True
        for one in tasks:
            ray.cancel(one)
        ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE_S)
    report = WarmReport.merged(_collect(ray, label, one, interrupted) for label, one in zip(labels, tasks, strict=True))
    report.interrupted |= interrupted
    return report


def run_shard(
    label: str, arguments: list[str], command: Sequence[str], folder: str, secrets: dict[str, str]
) -> tuple[str, int]:
    """What a task does: (what the shard's process printed, its exit status)."""
    job = Job(arguments, label, command, folder if os.path.isdir(folder) else None, secrets)
    try:
        job.wait()
    except KeyboardInterrupt:  # Ray's way to cancel
        job.signal(signal.SIGTERM)
        job.wait()
    finally:
        job.signal(signal.SIGKILL)
    return job.output, job.process.returncode


def _collect(ray: Any, label: str, task: Any, interrupted: bool) -> WarmReport:
    """The report of one task that has ended, or should have."""
    try:
        output, status = ray.get(task, timeout=1.0 if interrupted else None)
    except ray.exceptions.RayError as error:
        if interrupted:
            return WarmReport(interrupted=True)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return WarmReport(problems=[InputProblem(f"job {label}", None, f"lost: {reason}")])
    return report_of(label, output, status, interrupted)
