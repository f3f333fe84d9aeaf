"""Whether reuse pays for a request on this machine: from what earlier requests really took, never from a guess.

Two sums are compared before any block is loaded::

    recompute   forward(all rows)
    reuse       load(blocks, by tier) + choose(what to repair) + forward(glue + repaired rows)

(where blocks are read while the forward runs, the longer of the two instead of their sum).

Each term is a :class:`Curve` of this machine and model. Reuse is skipped only where recomputing takes less *at most*
than reuse *at least*, for the request as a whole. A term that was not measured yet is no reason to skip.
"""

from __future__ import annotations

import json
import logging
import platform
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvboost_rag.chunk import Prompt, Segment
from kvboost_rag.config import Repair
from kvboost_rag.engine.curve import Curve
from kvboost_rag.engine.repair import MAX_QUESTION_ROWS
from kvboost_rag.errors import CapacityError
from kvboost_rag.keys import digest_fields
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.store.base import BlockStore

log = logging.getLogger("kvboost_rag")

CHEAPER = "recomputed: cheaper"
MARGIN = 1.1  # what skipping has to win
PROBE_S = 0.5  # most seconds of one measurement of ours, after an answer


@dataclass(slots=True)
class Deal:
    """One request, weighed. Counts are tokens."""

    rows: int  # what a recomputation would forward
    context: int = 0  # of these: chunks
    mean_keys: float = 0.0  # positions that a row sees, on average
    scored_rows: int = 0  # rows of the pass that chooses what to repair
    recipe: str = ""
    tiers: Counter[int] = field(default_factory=Counter)  # tier → chunk tokens that would come from it
    reuse_s: float = 0.0  # what reuse takes at least
    skip: bool = False  # recompute all of it


class CostModel:
    """The costs of one model on one machine over one store; kept in the store's manifest. Thread-safe."""

    def __init__(self, adapter: ModelAdapter, store: BlockStore, *, overlap: bool = True) -> None:
        self.adapter = adapter
        self.store = store
        self._overlapped = {
            i for i, tier in enumerate(store.levels()) if overlap and tier.arrives
        }  # tiers read meanwhile
        self.forward = Curve()  # by rows, see _work
        self.load: dict[int, Curve] = {}  # tier → by tokens
        self.choose: dict[str, Curve] = {}  # recipe → by rows
        self.requests = self.recomputed = 0
        self._name = machine_name(adapter, store)
        self._lock = threading.RLock()
        self._changed = False
        self._take(store.get_meta(self._name))

    def weigh(self, prompt: Prompt, done: int, chunks: Sequence[tuple[Segment, str]], repair: Repair) -> Deal:
        """Decide on a prompt of which ``done`` tokens are held; ``chunks`` come with their keys."""
        n = prompt.num_tokens
        deal = Deal(rows=n - done, mean_keys=(n + done) / 2, recipe=repair.recipe)
        for segment, key in chunks:
            deal.tiers[self.store.tier_of(key)] += len(segment)
        deal.context = deal.tiers.total()
        deal.scored_rows = _scored_rows(prompt, done, deal.context, repair)
        if not chunks or repair.everything:
            return deal
        with self._lock:
            self.requests += 1
            deal.reuse_s = self._reuse_s(deal, len(chunks), repair)
            deal.skip = self.forward.high(self._work(deal.rows, deal.mean_keys)) * MARGIN < deal.reuse_s
            self.recomputed += deal.skip
        return deal

    def _reuse_s(self, deal: Deal, num_chunks: int, repair: Repair) -> float:
        rows = deal.rows - deal.context + _repaired(deal.context, num_chunks, repair)
        loading = {tier: self.load.get(tier, Curve()).low(tokens) for tier, tokens in deal.tiers.items()}
        meanwhile = max((loading.pop(tier) for tier in self._overlapped & set(loading)), default=0.0)
        choosing = self.choose.get(deal.recipe, Curve()).low(self._work(deal.scored_rows, deal.mean_keys))
        running = choosing + self.forward.low(self._work(rows, deal.mean_keys))
        return sum(loading.values()) + max(meanwhile, running)

    def _work(self, rows: float, mean_keys: float) -> float:
        """Rows, with their attention: a row costs about 24·width² per layer and 4·width for every key that it sees."""
        width = self.adapter.spec.num_heads * self.adapter.spec.head_dim
        return rows * (1 + mean_keys / (6 * width))

    def observe(
        self, deal: Deal, rows: float, hits: int, misses: int, stages: dict[str, float], loaded_s: float = 0.0
    ) -> None:
        """Learn from a request: ``rows`` were forwarded, of its chunks so many hit and missed; seconds by stage, and
        those that blocks took to come in, whatever else was done meanwhile."""
        with self._lock:
            learned = self.forward.observe(self._work(rows, deal.mean_keys), stages.get("forward", 0.0))
            if hits and not misses and len(deal.tiers) == 1:
                curve = self.load.setdefault(next(iter(deal.tiers)), Curve())
                learned |= curve.observe(
                    deal.context, stages.get("lookup", 0.0) + loaded_s + stages.get("compose", 0.0)
                )
                if deal.scored_rows and "score" in stages:
                    choose = self.choose.setdefault(deal.recipe, Curve())
                    learned |= choose.observe(self._work(deal.scored_rows, deal.mean_keys), stages["score"])
            self._changed |= learned

    def settle(self) -> None:
        """Wait for the device, so that a stage's seconds are its own."""
        if self.adapter.spec.device.type != "cpu":
            torch.accelerator.synchronize(self.adapter.spec.device)

    # -- after an answer -----------------------------------------------------------------------------------------------

    def after(self, prompt: Prompt, deal: Deal) -> None:
        """Measure what requests alone do not tell, and keep what is new. Raises nothing."""
        try:
            self._probe(prompt, deal)
        except (CapacityError, RuntimeError) as error:  # no room for it: then it stays unknown
            log.debug("cost probe failed: %s", error)
        if self._changed:
            self._save()

    def _probe(self, prompt: Prompt, deal: Deal) -> None:
        """Requests with hits forward few rows, and do not tell what many rows take. Where the decision hangs on it, run
        one forward over the prompt, or over as much of it as is sure to take at most :data:`PROBE_S`."""
        with self._lock:
            rows = self._probe_rows(deal)
        if rows:
            took = self._forward_s(prompt.token_ids[:rows])
            if took < PROBE_S / 2:  # the first run of a size may prepare kernels
                took = min(took, self._forward_s(prompt.token_ids[:rows]))
            with self._lock:
                self._changed |= self.forward.learn(self._work(rows, rows / 2), took)

    def _probe_rows(self, deal: Deal) -> int:
        full = self._work(deal.rows, deal.mean_keys)
        might_win = self.forward.low(full) * MARGIN < deal.reuse_s
        if deal.skip or not might_win or not self.forward.points:
            return 0
        rows = deal.rows
        if self.forward.high(full) > PROBE_S:
            size, seconds = self.forward.points[-1]
            rows = min(rows, int(size * PROBE_S / seconds))
            if self._work(rows, rows / 2) < 2 * size:
                return 0  # would hardly tell more
        return 0 if self.forward.knows(self._work(rows, rows / 2)) else rows

    def _forward_s(self, token_ids: tuple[int, ...]) -> float:
        device = self.adapter.spec.device
        ids = torch.tensor(token_ids, device=device)
        cache = self.adapter.new_cache(len(token_ids))
        with self.adapter.lock:
            self.settle()
            started = perf_counter()
            self.adapter.forward(ids, torch.arange(len(token_ids), device=device), cache)
            self.settle()
            return perf_counter() - started

    # -- keeping -------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able dict: how often it was asked, and what is known (seconds by size)."""
        with self._lock:
            known = self._known()
            rate = self.adapter.spec.bytes_per_token
            speeds = {t: max((rate * n / s for n, s in c.points), default=0.0) for t, c in self.load.items()}
            speed = max((n / s for n, s in self.forward.points), default=0.0)
            return {
                "requests": self.requests,
                "recomputed": self.recomputed,
                "forward_rows_per_s": speed,
                "load_bytes_per_s": {str(tier): value for tier, value in speeds.items()},
                "measured": known,
            }

    def _known(self) -> dict[str, Any]:
        return {
            "forward": self.forward.points,
            "load": {str(tier): curve.points for tier, curve in self.load.items()},
            "choose": {recipe: curve.points for recipe, curve in self.choose.items()},
        }

    def _save(self) -> None:
        with self._lock:
            self._changed = False
            self._take(self.store.get_meta(self._name))  # another process may have kept more meanwhile
            value = json.dumps(self._known()).encode()
        self.store.set_meta(self._name, value)

    def _take(self, value: bytes | None) -> None:
        """Learn what is kept; what cannot be read is measured again."""
        try:
            kept = json.loads(value or b"{}")
            forward = [(float(x), float(t)) for x, t in kept.get("forward", [])]
            load = [(int(n), float(x), float(t)) for n, ps in kept.get("load", {}).items() for x, t in ps]
            choose = [(str(n), float(x), float(t)) for n, ps in kept.get("choose", {}).items() for x, t in ps]
        except (ValueError, TypeError, AttributeError):
            return
        for size, seconds in forward:
            self.forward.learn(size, seconds)
        for tier, size, seconds in load:
            self.load.setdefault(tier, Curve()).learn(size, seconds)
        for recipe, size, seconds in choose:
            self.choose.setdefault(recipe, Curve()).learn(size, seconds)


@contextmanager
def settled(costs: CostModel | None) -> Iterator[None]:
    """Ends when the device has done what the block asked of it, if somebody wants to know how long that takes."""
    yield
    if costs is not None:
        costs.settle()


def _repaired(context: int, num_chunks: int, repair: Repair) -> int:
    """About how many of ``context`` tokens the policy recomputes."""
    return int(
        min(repair.cap * context, (repair.first + repair.last) * num_chunks + (repair.query + repair.blend) * context)
    )


def _scored_rows(prompt: Prompt, done: int, context: int, repair: Repair) -> int:
    last = prompt.segments[-1]
    first = last.start if last.kind == "glue" else prompt.num_tokens - 1
    question = min(MAX_QUESTION_ROWS, prompt.num_tokens - max(first, done))
    return context and question * bool(repair.query) + prompt.num_tokens * bool(repair.blend)


def machine_name(adapter: ModelAdapter, store: BlockStore) -> str:
    """The manifest entry of this model and these tiers on this kind of machine; no host name in it."""
    device = adapter.spec.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tiers = ",".join(type(tier).__name__ for tier in store.levels())
    parts = (
        _cpu_name(),
        where,
        str(torch.get_num_threads()),
        str(adapter.spec.dtype),
        adapter.fingerprint.digest,
        tiers,
    )
    return "cost:" + digest_fields(part.encode() for part in parts)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
