"""What a prefill came to, for the report: outcomes per chunk, counts of tokens, and how far the KV is exact."""

from __future__ import annotations

from kvboost_rag.chunk import Prompt
from kvboost_rag.config import Repair
from kvboost_rag.engine.lookup import Found
from kvboost_rag.engine.prefix import PrefixHit
from kvboost_rag.engine.repair import ReusedSpan
from kvboost_rag.engine.report import ChunkReport, Report
from kvboost_rag.model.cache import KVCache


def note_chunks(prompt: Prompt, done: int, found: list[Found], repaired: set[int], report: Report) -> None:
    """One :class:`ChunkReport` per chunk of the prompt, of which the first ``done`` tokens were held."""
    by_start = {f.segment.start: f for f in found}
    for s in prompt.chunks:
        if s.end <= done:
            outcome, reason = "prefix", "held prefix"
        else:
            f = by_start[s.start]
            outcome, reason = ("hit" if f.block is not None else "miss"), f.reason
        count = sum(s.start <= p < s.end for p in repaired) if repaired else 0
        report.chunks.append(ChunkReport(s.start, s.end, outcome, reason, count, s.text[:60]))


def note_counts(
    report: Report, cache: KVCache, done: int, spans: list[ReusedSpan], repaired: list[int], exact: int
) -> None:
    """Tokens that were reused, repaired and forwarded."""
    forwarded = {*repaired, *_last_in(spans, report.prompt_tokens - 1)}
    report.reused_tokens = done + sum(s.end - s.start for s in spans) - len(forwarded)
    report.repaired_tokens = len(repaired)
    report.repaired_positions = repaired
    report.forwarded_tokens = cache.rows
    report.scoring_tokens = cache.scoring_rows
    report.exact = exact == report.prompt_tokens


def _last_in(spans: list[ReusedSpan], last: int) -> list[int]:
    """The last token, if it stands in a reused chunk: it is forwarded all the same, for its logits."""
    return [last] if any(s.start <= last < s.end for s in spans) else []


def exact_tokens(hit: PrefixHit | None, found: list[Found], repair: Repair, total: int) -> int:
    """How many leading positions hold KV that equals a full prefill."""
    if hit is not None and not hit.exact:
        return hit.held.exact_tokens
    if repair.everything:
        return total
    approximate = [f.segment.start for f in found if f.block is not None and not f.exact]
    return min(approximate, default=total)
