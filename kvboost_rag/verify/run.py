"""Answer every item twice, with reuse and by full prefill, and compare the distributions.

Full prefill runs over the very span tokens that reuse runs over, so what is measured is reuse and nothing else. Nothing
of a verification is held in the engine's prefix cache, and nothing held there takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvboost_rag.config import Repair, resolve_repair
from kvboost_rag.engine.divergence import divergence
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import Request
from kvboost_rag.engine.result import Result
from kvboost_rag.engine.verdicts import Verdict
from kvboost_rag.errors import KVBoostError, TokenizerError, UsageError
from kvboost_rag.verify.items import VerifyItem
from kvboost_rag.verify.report import MAX_KL, MIN_AGREEMENT, ItemCheck, TokenCheck, VerifyReport


def verify(
    engine: Any,
    items: Iterable[VerifyItem | Mapping[str, Any]],
    *,
    policy: str | Repair | None = None,
    max_new_tokens: int = 32,
    max_kl: float = MAX_KL,
    min_agreement: float = MIN_AGREEMENT,
    progress: Callable[[int, int], None] | None = None,
    keep: bool = True,
) -> VerifyReport:
    """Measure what reuse changes in the answers to ``items``.

    Args:
        engine: a :class:`KVBoost` or its :class:`Engine`.
        items: see :class:`VerifyItem`; mappings are taken as they stand in a jsonl file.
        policy: what is repaired (default: the engine's own).
        max_new_tokens: length of the answers that are compared.
        max_kl, min_agreement: thresholds of :attr:`VerifyReport.ok`.
        progress: called with (done, total) after each item.
        keep: keep the verdict in the engine's store, in place of an earlier one on this policy, for every engine over
            that store (``on_low_fidelity``). Not where nothing was measured: full repair, or no chunk was reused.

    Blocks that the store lacks are computed and stored first: a miss would be forwarded, and look exact.

    Raises:
        UsageError: no items, or one of them is malformed.
        ContextLengthError: a question with its passages is longer than the window; named by its number.
        UnsupportedModelError: reuse is not proved for this model.
    """
    checked = [VerifyItem.build(i) for i in items]
    if not checked:
        raise UsageError("there is nothing to verify", hint="give at least one question with its passages")
    own: Engine = getattr(engine, "engine", engine)
    own.adapter.require_reuse()
    repair = resolve_repair(policy if policy is not None else getattr(engine, "repair", "balanced"))
    pair = _Pair(
        Engine(own.adapter, own.tokens, own.encoder, prefix_bytes=0, overlap=own.overlap), repair, max_new_tokens
    )
    warmed = 0
    found: list[ItemCheck] = []
    with own.busy():
        for number, item in enumerate(checked, 1):
            try:
                warmed += pair.warm(item.chunks)
                found.append(pair.check(item))
            except KVBoostError as error:
                error.message = f"question {number} of {len(checked)}: {error.message}"
                raise
            if progress is not None:
                progress(number, len(checked))
    report = VerifyReport(
        own.adapter.name, repair.label, tuple(found), max_kl, min_agreement, warmed, tuple(_notes(found))
    )
    measured = not repair.everything and any(i.reused_tokens for i in found)
    return replace(report, kept=own.verdicts.keep(repair, _verdict(report))) if keep and measured else report


def _verdict(report: VerifyReport) -> Verdict:
    return Verdict(
        policy=report.policy,
        ok=report.ok,
        kl=report.kl,
        agreement=report.agreement,
        changed=len(report.changed),
        questions=len(report.items),
        max_kl=report.max_kl,
        min_agreement=report.min_agreement,
        created_s=time.time(),
    )


class _Recorder:
    """A logits processor that changes nothing and keeps every step's logits."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores[0].float().cpu())
        return scores


@dataclass(slots=True)
class _Pair:
    """The two ways to answer."""

    engine: Engine
    repair: Repair
    max_new_tokens: int

    def warm(self, chunks: Sequence[str]) -> int:
        """Store the blocks that are missing; how many were."""
        encoder, count = self.engine.encoder, 0
        for text in dict.fromkeys(c.strip() for c in chunks):
            try:
                ids = encoder.tokenize(text)
            except (UsageError, TokenizerError):
                continue  # the engine itself treats such a text as plain prompt
            key = encoder.key(ids)
            if len(ids) > encoder.max_chunk_tokens or self.engine.store.contains(key):
                continue
            self.engine.store.put(encoder.encode([ids], texts=[text])[0])
            encoder.register([(text, key)])
            count += 1
        return count

    def check(self, item: VerifyItem) -> ItemCheck:
        """One item, both ways."""
        request = self._request(item)
        prompt, _ = self.engine.segment(request, Report())
        full, logits = self._full(prompt.token_ids)
        score = self.engine.score(request, full.token_ids, logits=True)
        assert score.logits is not None, "logits were asked for"
        kl = divergence(logits, score.logits)
        ours, theirs = score.logits.argmax(-1), logits.argmax(-1)
        reuse = _last(self.engine, request)
        return ItemCheck(
            question=item.question,
            full_text=full.text,
            reuse_text=reuse.text,
            kl_first=float(kl[0]),
            kl=float(kl.mean()),
            agreement=float((ours == theirs).float().mean()),
            prompt_tokens=prompt.num_tokens,
            forwarded_tokens=reuse.report.forwarded_tokens,
            reused_tokens=reuse.report.reused_tokens,
            repaired_tokens=reuse.report.repaired_tokens,
            full_ttft_s=full.report.ttft_s,
            reuse_ttft_s=reuse.report.ttft_s,
            tokens=tuple(self._token(i, full.token_ids, kl, ours) for i in range(len(full.token_ids))),
            warnings=tuple(reuse.report.warnings),
        )

    def _request(self, item: VerifyItem) -> Request:
        options = {"chunks": item.chunks, "max_new_tokens": self.max_new_tokens}
        return Request.build(item.prompt, reuse="chunks", repair=self.repair, options=options)

    def _full(self, token_ids: tuple[int, ...]) -> tuple[Result, torch.Tensor]:
        """Greedy answer of a plain prefill over these ids, and the logits ``[answer, vocab]`` along it."""
        recorder = _Recorder()
        options = {"max_new_tokens": self.max_new_tokens, "logits_processors": (recorder,)}
        request = Request.build(list(token_ids), reuse="off", repair=Repair.full(), options=options)
        result = _last(self.engine, request)
        return result, torch.stack(recorder.steps[: len(result.token_ids)])

    def _token(self, index: int, ids: list[int], kl: torch.Tensor, ours: torch.Tensor) -> TokenCheck:
        decode = self.engine.tokens.decode
        other = "" if int(ours[index]) == ids[index] else decode([int(ours[index])])
        return TokenCheck(decode([ids[index]]), round(float(kl[index]), 6), other)


def _last(engine: Engine, request: Request) -> Result:
    result: Result | None = None
    for piece in engine.run(request):
        result = piece.result or result
    assert result is not None, "the last piece carries the result"
    return result


def _notes(items: Sequence[ItemCheck]) -> list[str]:
    """What a reader must know to trust the figures."""
    notes = []
    idle = sum(i.idle for i in items)
    if idle:
        notes.append(f"{idle} of {len(items)} prompts reused nothing: do their chunks stand verbatim in the prompt?")
    if len(items) < 10:
        notes.append(f"{len(items)} questions are few: figures may change much with more")
    return notes
