"""From a segmented prompt to the first token's logits: prefix, look up, compose, repair, one forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvboost_rag.chunk import Prompt, Segment
from kvboost_rag.config import Repair
from kvboost_rag.engine.arrivals import Arrivals
from kvboost_rag.engine.carrier import Carrier
from kvboost_rag.engine.compose import lay_prefix
from kvboost_rag.engine.cost import CHEAPER, CostModel, Deal, settled
from kvboost_rag.engine.decode import CancelToken, RequestCancelled
from kvboost_rag.engine.lookup import BlockFinder, Found
from kvboost_rag.engine.place import Placing
from kvboost_rag.engine.prefix import PrefixHit
from kvboost_rag.engine.repair import (
    Choice,
    ReusedSpan,
    boundary_budget,
    boundary_positions,
    budget,
    even_positions,
    key_deviation,
    question_scores,
    top_positions,
)
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.shift import Shifter
from kvboost_rag.engine.spread import Lesson, Spreader
from kvboost_rag.engine.tally import exact_tokens, note_chunks, note_counts
from kvboost_rag.engine.used import Used
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.cache import ForwardCut, KVCache, Reviser
from kvboost_rag.store.arriving import ArrivingBlock


@dataclass(slots=True)
class Prepared:
    """A prompt whose KV is in place: ``logits [1, vocab]`` are those of its last token."""

    prompt: Prompt
    cache: KVCache
    logits: torch.Tensor
    exact_tokens: int  # leading positions whose KV equals a full prefill
    missed: list[Segment] = field(default_factory=list)
    skipped: list[Segment] = field(default_factory=list)  # not looked up: recomputing is cheaper
    deal: Deal | None = None  # what a cost model thought of it
    used: Used = field(default_factory=Used)  # for the store's tier in front
    plain_cache: Any = None  # the model's own cache, where ours cannot serve


class Prefiller:
    """Fills a request's cache. One instance per engine; holds no request state."""

    def __init__(self, adapter: ModelAdapter, finder: BlockFinder, carrier: Carrier | None = None) -> None:
        self.adapter = adapter
        self.finder = finder
        self.carrier = carrier

    def sweep(self) -> None:
        """Let go of blocks that were only held because a copy to the device might still read them."""
        if self.carrier is not None:
            self.carrier.sweep()

    def prepare(
        self,
        prompt: Prompt,
        hit: PrefixHit | None,
        repair: Repair,
        capacity: int,
        report: Report,
        costs: CostModel | None = None,
        cancel: CancelToken | None = None,
    ) -> Prepared:
        """Compose, repair and forward. ``capacity`` counts prompt and new tokens. ``costs`` may decide against reuse,
        and learns from what it sees.

        Raises:
            RequestCancelled: by ``cancel``, while blocks were waited for.
            CapacityError: no room for the request's KV.
        """
        done = hit.num_tokens if hit is not None else 0
        report.prompt_tokens = prompt.num_tokens
        used = Used(self.finder.store.deletions)
        with report.stage("lookup"):
            deal = self._weigh(costs, prompt, done, repair)
            found = self._find(prompt, done, deal)
        with Arrivals(found, self.adapter.rope, report, lambda: cancel is not None and cancel.cancelled) as arrivals:
            cache = self.adapter.new_cache(capacity)
            cache.extend(prompt.num_tokens)
            self._lay_prefix(cache, hit, report)
            while True:
                try:
                    spans, choice, logits = self._fill(prompt, cache, done, found, arrivals, repair, report, costs)
                    break
                except ForwardCut:
                    found = self._go_without(found, arrivals, cache, report)
        arrivals.check()
        used.note(found, self.finder.store)
        repaired = choice.positions
        note_chunks(prompt, done, found, set(repaired), report)
        if costs is not None and deal is not None and not report.vain_tokens:
            rows = cache.rows - cache.scoring_rows
            costs.observe(deal, rows, len(spans), len(found) - len(spans), report.stages, arrivals.loaded_s)
        exact = exact_tokens(hit, found, repair, prompt.num_tokens)
        note_counts(report, cache, done, spans, repaired, exact)
        missed = [f.segment for f in found if f.block is None]
        skipped = missed if deal is not None and deal.skip else []
        return Prepared(prompt, cache, logits, exact, [] if skipped else missed, skipped, deal, used)

    def _fill(
        self,
        prompt: Prompt,
        cache: KVCache,
        done: int,
        found: list[Found],
        arrivals: Arrivals,
        repair: Repair,
        report: Report,
        costs: CostModel | None,
    ) -> tuple[list[ReusedSpan], Choice, torch.Tensor]:
        """From blocks to logits: the spans that were reused, the positions in them that were recomputed, and the
        logits. May be done again, over the same cache. Raises ForwardCut: a block that was counted on is lost."""
        ids = torch.tensor(prompt.token_ids, device=self.adapter.spec.device)
        spans = [ReusedSpan(f.segment.start, f.segment.end, f.exact) for f in found if f.block is not None]
        with Placing(cache, found, self.adapter.rope, report, arrivals, self.carrier, costs) as placing:
            placing.lay(cache, 0)  # until its first layer has come, a request does not hold the model
            choice = self._choose(prompt, cache, ids, done, spans, repair, report)
            with report.stage("forward"), settled(costs):
                logits = self._forward(cache, ids, done, spans, choice, repair)
        arrivals.loaded_s = max(arrivals.loaded_s, placing.carried_s)
        return spans, choice, logits

    def _go_without(self, found: list[Found], arrivals: Arrivals, cache: KVCache, report: Report) -> list[Found]:
        """After a cut: what there is in place of the blocks that were lost. The rows that ran stay counted."""
        vain = cache.rows - report.vain_tokens
        report.vain_tokens = report.forwarded_tokens = cache.rows
        cache.scoring_rows = 0.0
        lost = arrivals.lost()
        if not lost:
            raise RequestCancelled
        if vain:
            why = "; ".join(f"{miss.reason}: {miss.detail}" for miss in lost.values())
            report.warnings.append(f"{vain:.0f} tokens were forwarded in vain, a block was lost on its way ({why})")
        with report.stage("lookup"):
            return [
                self.finder.without(f, lost[f.block]) if isinstance(f.block, ArrivingBlock) and f.block in lost else f
                for f in found
            ]

    @staticmethod
    def _lay_prefix(cache: KVCache, hit: PrefixHit | None, report: Report) -> None:
        if hit is None:
            return
        with report.stage("prefix"):
            lay_prefix(cache, hit)
        report.prefix_tokens, report.prefix_exact = hit.num_tokens, hit.exact

    def _weigh(self, costs: CostModel | None, prompt: Prompt, done: int, repair: Repair) -> Deal | None:
        if costs is None:
            return None
        chunks = [s for s in prompt.chunks if s.start >= done]
        return costs.weigh(prompt, done, [(s, self.finder.key(s)) for s in chunks], repair)

    def _find(self, prompt: Prompt, done: int, deal: Deal | None) -> list[Found]:
        if deal is not None and deal.skip:
            return [Found(s, None, False, CHEAPER) for s in prompt.chunks if s.start >= done]
        if not any(s.kind == "chunk" and s.end > done for s in prompt.segments):
            return []
        return self.finder.find(prompt.segments, prompt.token_ids, done)

    def _choose(
        self,
        prompt: Prompt,
        cache: KVCache,
        ids: torch.Tensor,
        done: int,
        spans: list[ReusedSpan],
        repair: Repair,
        report: Report,
    ) -> Choice:
        """Positions of reused chunks to recompute."""
        open_spans = [s for s in spans if not s.exact]
        candidates = [p for s in open_spans for p in range(s.start, s.end)]
        if repair.everything:
            return Choice([p for s in spans for p in range(s.start, s.end)])
        if repair.is_none or not candidates:
            return Choice([])
        context = len(candidates)  # what is approximate now: no misses, no held turns, no own-head chunk
        chosen = set(boundary_positions(open_spans, repair, boundary_budget(repair, context)))
        sampled: list[int] = []
        if not budget(repair, repair.query + repair.blend, context, len(chosen)):
            return Choice(sorted(chosen))
        with report.stage("score"):
            count = budget(repair, repair.query, context, len(chosen))
            if count:
                free = [p for p in candidates if p not in chosen]
                scores = self._question_scores(prompt, cache, ids, done, spans)
                sampled = even_positions(free, int(count * repair.sample)) if repair.spread else []
                chosen.update(sampled)
                chosen.update(top_positions(scores, [p for p in free if p not in chosen], count - len(sampled)))
            count = budget(repair, repair.blend, context, len(chosen))
            if count:
                free = [p for p in candidates if p not in chosen]
                chosen.update(top_positions(key_deviation(self.adapter, cache, ids), free, count))
        return Choice(sorted(chosen), frozenset(sampled))

    def _question_scores(
        self, prompt: Prompt, cache: KVCache, ids: torch.Tensor, done: int, spans: list[ReusedSpan]
    ) -> torch.Tensor:
        """Chunks that are in place are scored, glue is hidden even where it is held: so the choice, and with it the
        answer, does not depend on what an earlier request left behind."""
        hidden = torch.ones(prompt.num_tokens, dtype=torch.bool, device=ids.device)
        for start, end in [(s.start, s.end) for s in spans] + [
            (c.start, c.end) for c in prompt.chunks if c.end <= done
        ]:
            hidden[start:end] = False
        empty = hidden.clone()
        empty[:done] = False  # fresh memory may hold NaN, which no mask stops
        cache.clear(empty.nonzero().flatten())
        last = prompt.segments[-1]
        first = last.start if last.kind == "glue" else prompt.num_tokens - 1
        question = torch.arange(max(first, done), prompt.num_tokens, device=ids.device)
        return question_scores(self.adapter, cache, ids, question, hidden)

    def _forward(
        self,
        cache: KVCache,
        ids: torch.Tensor,
        done: int,
        spans: list[ReusedSpan],
        choice: Choice,
        repair: Repair,
    ) -> torch.Tensor:
        n = ids.numel()
        rows = torch.ones(n, dtype=torch.bool)
        rows[:done] = False
        for s in spans:
            rows[s.start : s.end] = False
        stale = torch.zeros(n, dtype=torch.bool)
        for s in spans:
            stale[s.start : s.end] = not s.exact
        if choice.positions:
            rows[choice.positions] = True
            stale[choice.positions] = False
        rows[n - 1] = True  # the last token is always forwarded
        positions = rows.nonzero().flatten().to(ids.device)
        reviser = self._reviser(spans, choice, stale.nonzero().flatten(), repair)
        with cache.lock, cache.revised_by(reviser):
            logits = self.adapter.forward(ids[positions], positions, cache)
        cache.length = n
        return logits

    def _reviser(self, spans: list[ReusedSpan], choice: Choice, stale: torch.Tensor, repair: Repair) -> Reviser | None:
        """What corrects the stale positions on the forward's way, if anything does."""
        if repair.everything or not choice.positions or not stale.numel():
            return None
        rope, device = self.adapter.rope, self.adapter.spec.device
        if repair.spread:
            lesson = Lesson.of([(s.start, s.end) for s in spans if not s.exact], choice.positions, choice.sampled)
            if lesson is not None:
                return Spreader(rope, lesson, stale, repair.spread, self.adapter.spec.num_layers, device)
        return Shifter(rope, torch.tensor(choice.positions), stale, device) if repair.shift else None
