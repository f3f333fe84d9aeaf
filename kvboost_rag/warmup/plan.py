"""The dry run: what a warm-up would compute, how large it gets and, from one measured batch, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvboost_rag.warmup.batch import group
from kvboost_rag.warmup.encoder import Encoder
from kvboost_rag.warmup.ingest import Corpus
from kvboost_rag.warmup.intake import Intake, Item
from kvboost_rag.warmup.report import WarmPlan
from kvboost_rag.warmup.source import Shard, SourceChunk

PROBE_TOKENS = 1024  # slots of the batch that is measured
PROBE_CHUNKS = 32  # new chunks kept to make that batch from


def plan(
    chunks: Iterable[SourceChunk | str], encoder: Encoder, *, shard: Shard | None = None, probe: bool = True
) -> WarmPlan:
    """Read and tokenise ``chunks`` (a :class:`Corpus` or any iterable) and say what :func:`warm` would have to do.

    Stores nothing. With ``probe``, one small real batch is encoded to measure the speed; without it, or where that
    batch fails, ``estimate_s`` is None.

    Raises:
        UsageError: a shard that does not exist, or chunks of a wrong type.
        MissingExtraError: a library that an input needs is not installed.
    """
    intake = Intake(encoder, shard)
    seen = new = tokens = 0
    sample: list[Item] = []
    for item in intake.items(chunks):
        seen += 1
        if item.missing:
            new += 1
            tokens += len(item.ids) * len(item.missing)
            if len(sample) < PROBE_CHUNKS:
                sample.append(item)
    corpus = chunks if isinstance(chunks, Corpus) else None
    return WarmPlan(
        chunks=seen + intake.failed,
        new_chunks=new,
        already_stored=seen - new,
        tokens=tokens,
        bytes=tokens * encoder.bytes_per_token,
        estimate_s=_estimate(encoder, sample, tokens) if probe else None,
        problems=(*(corpus.problems if corpus else ()), *intake.problems),
        ignored=dict(corpus.ignored) if corpus else {},
    )


def _estimate(encoder: Encoder, sample: list[Item], tokens: int) -> float | None:
    if not sample:
        return 0.0
    most = min(PROBE_TOKENS, encoder.max_batch_tokens or PROBE_TOKENS)
    batches = group([len(item.ids) for item in sample], most, packed=encoder.packs)
    batch = [sample[i] for i in max(batches, key=lambda b: sum(len(sample[i].ids) for i in b))]
    shortest = min(sample, key=lambda item: len(item.ids))
    try:
        # The first call also computes the context and warms caches up, which the whole job pays only once.
        encoder.encode([shortest.ids], texts=[shortest.text])
        started = time.perf_counter()
        encoder.encode([item.ids for item in batch], texts=[item.text for item in batch])
        seconds = time.perf_counter() - started
    except Exception:  # an estimate is not worth failing for; the job itself reports errors
        return None
    return tokens * seconds / sum(len(item.ids) for item in batch)
