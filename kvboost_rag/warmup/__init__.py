"""Warm-up: from a corpus to stored blocks. ``Corpus`` reads, ``plan`` is the dry run, ``warm`` does it."""

from __future__ import annotations

from kvboost_rag.warmup.encoder import Encoder
from kvboost_rag.warmup.ingest import Corpus, SplitOptions
from kvboost_rag.warmup.job import warm
from kvboost_rag.warmup.plan import plan
from kvboost_rag.warmup.progress import WarmProgress
from kvboost_rag.warmup.report import WarmPlan, WarmReport
from kvboost_rag.warmup.source import InputProblem, SourceChunk, unique

__all__ = [
    "Corpus",
    "Encoder",
    "InputProblem",
    "SourceChunk",
    "SplitOptions",
    "WarmPlan",
    "WarmProgress",
    "WarmReport",
    "plan",
    "unique",
    "warm",
]
