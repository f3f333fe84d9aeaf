"""Spot checks: a share of live answers is compared with full prefill, in idle time.

What reuse made of an answer is known when it is given: the logits of its first tokens are kept (references, nothing is
computed). A background thread then runs a full prefill over the same tokens, a few rows at a time, and only while no
request runs: a request that comes meanwhile waits for those few rows at most. Answers are never changed, and whatever
goes wrong here is counted, not raised.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvboost_rag.chunk import Prompt
from kvboost_rag.engine.decode import Step
from kvboost_rag.engine.divergence import divergence
from kvboost_rag.engine.request import Request
from kvboost_rag.errors import UsageError
from kvboost_rag.keys import digest_fields, token_bytes
from kvboost_rag.model.adapter import ModelAdapter

log = logging.getLogger("kvboost_rag")

ANSWER_TOKENS = 32  # of an answer that are compared
SLICE_ROWS = 16  # of a check's prefill that run before it looks up again
MOST_WAITING = 4  # answers; further ones are dropped
ROLLING = 256  # checks that the figures are taken over


def check_share(value: object) -> float:
    """Validate ``spot_check``.

    Raises:
        UsageError: not a number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"spot_check must be a share between 0 and 1, got {value!r}", hint="0.01 checks one in 100")
    return float(value)


@dataclass(slots=True)
class Watch:
    """One answer that is to be checked: its prompt's tokens, and the logits ``[1, vocab]`` of its first tokens."""

    token_ids: tuple[int, ...]
    fingerprint: str
    logits: list[torch.Tensor] = field(default_factory=list)
    answer: tuple[int, ...] = ()

    def record(self, first: torch.Tensor, step: Step) -> Step:
        """``step``, whose logits are also kept here."""
        self.logits.append(first)

        def recorded(token_id: int, position: int) -> torch.Tensor:
            logits = step(token_id, position)
            if len(self.logits) < ANSWER_TOKENS:
                self.logits.append(logits)
            return logits

        return recorded


class SpotChecker:
    """Checks about ``share`` of the answers that reused something approximately. Which ones is decided by the content
    of the request: the same request is always checked or never. Thread-safe."""

    def __init__(self, adapter: ModelAdapter, share: float) -> None:
        self.adapter = adapter
        self.share = share
        self._idle = threading.Condition()
        self._running = 0
        self._waiting: deque[Watch] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._found: deque[tuple[float, float]] = deque(maxlen=ROLLING)  # mean KL, agreement
        self._counts = {"checked": 0, "dropped": 0, "errors": 0}

    # -- what an engine calls ------------------------------------------------------------------------------------------

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request runs: checks wait."""
        with self._idle:
            self._running += 1
        try:
            yield
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def watch(self, request: Request, prompt: Prompt) -> Watch | None:
        """What the answer is to be recorded in, if this request is one that is checked."""
        digest = digest_fields([b"spot", token_bytes(prompt.token_ids), request.repair.recipe.encode()])
        if int(digest[:16], 16) >= self.share * 2**64 or self._closed:
            return None
        return Watch(prompt.token_ids, self.adapter.fingerprint.digest)

    def offer(self, watch: Watch, answer: list[int]) -> None:
        """Check this answer when there is time; drop it if too many wait."""
        watch.answer = tuple(answer[: len(watch.logits)])
        if not watch.answer:
            return
        with self._idle:
            if self._closed or len(self._waiting) >= MOST_WAITING:
                self._counts["dropped"] += 1
                return
            self._waiting.append(watch)
            if self._worker is None:
                # Lives as long as there is something to check: an idle engine is held by no thread.
                self._worker = threading.Thread(target=self._work, name="kvboost-spot", daemon=True)
                atexit.register(self.close)
                self._worker.start()

    def stats(self) -> dict[str, float | None]:
        """Counts, and figures over the last :data:`ROLLING` checks (None before the first). KL is KL(full prefill ‖
        reuse) in nats, mean over the first tokens of an answer as it was given; ``worst_kl`` the largest such mean;
        ``agreement`` the share of these tokens where both would choose the same."""
        with self._idle:
            n = len(self._found)
            return {
                "share": self.share,
                **self._counts,
                "waiting": len(self._waiting),
                "mean_kl": sum(kl for kl, _ in self._found) / n if n else None,
                "agreement": sum(share for _, share in self._found) / n if n else None,
                "worst_kl": max(kl for kl, _ in self._found) if n else None,
            }

    def wait(self) -> None:
        """Until nothing waits to be checked; meanwhile no request should run."""
        with self._idle:
            worker = self._worker
        if worker is not None:
            worker.join()

    def close(self) -> None:
        """Drop what waits, and wait for the rows in progress. Safe to call twice."""
        with self._idle:
            self._closed = True
            self._counts["dropped"] += len(self._waiting)
            self._waiting.clear()
            self._idle.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    # -- in the background ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (watch := self._next()) is not None:
            try:
                found = self._check(watch)
            except Exception as error:
                log.debug("spot check failed", exc_info=error)
                self._count("errors")
            else:
                self._note(found)

    def _next(self) -> Watch | None:
        with self._idle:
            if self._waiting:
                return self._waiting.popleft()
            self._worker = None
            atexit.unregister(self.close)
        return None

    def _count(self, name: str) -> None:
        with self._idle:
            self._counts[name] += 1

    def _note(self, found: tuple[float, float] | None) -> None:
        if found is None:
            self._count("dropped")
            return
        with self._idle:
            self._counts["checked"] += 1
            self._found.append(found)

    def _may_go_on(self) -> bool:
        """Waits while requests run; False when it is over."""
        with self._idle:
            self._idle.wait_for(lambda: self._closed or not self._running)
            return not self._closed

    def _check(self, watch: Watch) -> tuple[float, float] | None:
        """Mean KL and agreement; None if the engine closed or the model's adapters changed meanwhile."""
        full = self._full_logits(watch)
        if full is None or self.adapter.fingerprint.digest != watch.fingerprint:
            return None
        ours = torch.cat(watch.logits[: len(watch.answer)]).cpu()
        same = (ours.argmax(-1) == full.argmax(-1)).float().mean()
        return float(divergence(full, ours).mean()), float(same)

    def _full_logits(self, watch: Watch) -> torch.Tensor | None:
        """Logits ``[answer, vocab]`` of a full prefill over the prompt and the answer that was given."""
        device = self.adapter.spec.device
        ids = torch.tensor(watch.token_ids + watch.answer[:-1], device=device)
        first = len(watch.token_ids) - 1  # the row that says the answer's first token
        rows: list[torch.Tensor] = []
        cache = None
        for start in range(0, len(ids), SLICE_ROWS):
            if not self._may_go_on():
                return None
            cache = self.adapter.new_cache(len(ids)) if cache is None else cache
            end = min(start + SLICE_ROWS, len(ids))
            wanted = max(0, end - max(start, first))
            positions = torch.arange(start, end, device=device)
            logits = self.adapter.forward(ids[start:end], positions, cache, keep_logits=max(1, wanted))
            rows += [logits] if wanted else []
        return torch.cat(rows).cpu()
