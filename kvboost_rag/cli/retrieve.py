"""A small retriever for the command line: BM25 over the chunks of a corpus, in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvboost_rag.warmup import SourceChunk
from kvboost_rag.warmup.readers import require

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-cased words; a text without any counts as one empty word, so that every text has a length."""
    return _WORD.findall(text.lower()) or [""]


def best_chunks(question: str, chunks: Sequence[SourceChunk], count: int) -> list[SourceChunk]:
    """At most ``count`` chunks, best first; equal scores keep the corpus's order.

    BM25+ rather than plain BM25, whose word weights turn negative in corpora of a few chunks.

    Raises:
        MissingExtraError: rank-bm25 is not installed.
    """
    if not chunks:
        return []
    bm25 = require("rank_bm25").BM25Plus([words(chunk.text) for chunk in chunks])
    scores = bm25.get_scores(words(question))
    order = sorted(range(len(chunks)), key=lambda i: -scores[i])
    return [chunks[i] for i in order[:count]]
