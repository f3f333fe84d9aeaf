"""The engine core: one request from prompt to pieces of text. The public facade is ``kvboost_rag.api``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from kvboost_rag.chunk import Prompt, Segment
from kvboost_rag.config import Repair
from kvboost_rag.engine.carrier import Carrier
from kvboost_rag.engine.cost import CostModel
from kvboost_rag.engine.decode import CancelToken, RequestCancelled, Step, cached_step, end_ids, token_loop
from kvboost_rag.engine.encode import ChunkEncoder
from kvboost_rag.engine.guard import FidelityGuard, OnLowFidelity
from kvboost_rag.engine.leave import held_entry, store_missed
from kvboost_rag.engine.lookup import BlockFinder
from kvboost_rag.engine.plain import plain_prefill
from kvboost_rag.engine.prefill import Prefiller, Prepared
from kvboost_rag.engine.prefix import PrefixCache, PrefixHit, common_prefix
from kvboost_rag.engine.render import Rendered, render_chat, render_text
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import Request, is_token_ids
from kvboost_rag.engine.result import Piece, Result, Score
from kvboost_rag.engine.sample import Sampler
from kvboost_rag.engine.segment import Segmenter
from kvboost_rag.engine.spot import SpotChecker, Watch
from kvboost_rag.engine.text import Detokenizer
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.engine.totals import Totals
from kvboost_rag.engine.verdicts import Verdicts
from kvboost_rag.errors import ContextLengthError, EmptyPromptError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.once import Once
from kvboost_rag.store.base import BlockStore

LONG_PROMPT_TOKENS = 512  # a prompt this long without a match, with a filled store, is worth one warning


class Engine:
    """Answers requests over one model, one store and one encoder. Safe from several threads: each forward takes the
    model's lock, requests hold no shared state but the store and the prefix cache.

    Without options it answers as it is asked to and says nothing: this is how verifications measure.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokens: SpanTokenizer,
        encoder: ChunkEncoder,
        *,
        prefix_bytes: int,
        on_low_fidelity: OnLowFidelity = "ignore",
        costs: CostModel | None = None,
        spot: SpotChecker | None = None,
        overlap: bool = True,
        carrier: Carrier | None = None,
    ) -> None:
        self.adapter, self.tokens, self.encoder = adapter, tokens, encoder
        self.store: BlockStore = encoder.store
        self.salt = encoder.salt
        self.prefixes = PrefixCache(prefix_bytes)
        self.totals = Totals()
        self.segmenter = Segmenter(tokens, self.store.anchors, self._tokens_of_key, self.salt)
        self.overlap, self.carrier = overlap, carrier
        self.prefiller = Prefiller(adapter, BlockFinder(encoder, self.store, overlap=overlap), carrier)
        self.eos_ids = end_ids(adapter)
        self.verdicts = Verdicts(encoder)
        self.guard = FidelityGuard(self.verdicts, on_low_fidelity)
        self.costs, self.spot = costs, spot
        self._once = Once()

    def _tokens_of_key(self, key: str) -> tuple[int, ...] | None:
        """Ids of the block under ``key`` if it may serve here: a store holds other models' and contexts' blocks too."""
        block = self.store.get(key)
        return block.token_ids if isinstance(block, Block) and self.encoder.key(block.token_ids) == key else None

    def render(self, request: Request) -> Rendered:
        """The prompt as text, with the places of message contents."""
        if isinstance(request.prompt, str):
            return render_text(request.prompt)
        return render_chat(
            self.adapter.tokenizer,
            request.prompt,  # type: ignore[arg-type]
            tools=list(request.tools) or None,
            **request.template_kwargs,
        )

    def segment(self, request: Request, report: Report) -> tuple[Prompt, PrefixHit | None]:
        """Render, match and tokenise, and find the longest held prefix."""
        if is_token_ids(request.prompt):
            prompt = self._from_ids(request)
            return prompt, self._exact_prefix(prompt, request)
        with report.stage("render"):
            rendered = self.render(request)
        with report.stage("match"):
            if request.reuse != "chunks":
                prompt = self.segmenter.whole(rendered)
                return prompt, self._exact_prefix(prompt, request)
            held = self.prefixes.continuation(rendered.text, rendered.contents, **self._scope(request.repair))
            prompt = self.segmenter.split(rendered, request.chunks, held)
        if held is not None and common_prefix(prompt.token_ids, held.token_ids) == len(held.token_ids):
            n = min(len(held.token_ids), prompt.num_tokens - 1)
            return prompt, PrefixHit(held, n, exact=n <= held.exact_tokens)
        return prompt, self._exact_prefix(prompt, request)

    def _scope(self, repair: Repair) -> dict[str, str]:
        return {"fingerprint": self.adapter.fingerprint.digest, "salt": self.salt, "policy": repair.recipe}

    def _from_ids(self, request: Request) -> Prompt:
        ids = self._checked([int(i) for i in request.prompt])  # type: ignore[arg-type]
        return Prompt("", (Segment("glue", "", tuple(ids), 0),))

    def _checked(self, ids: list[int]) -> list[int]:
        if min(ids) < 0 or max(ids) >= self.adapter.spec.vocab_size:
            raise UsageError(f"token ids must be from 0 to {self.adapter.spec.vocab_size - 1}")
        return ids

    def _exact_prefix(self, prompt: Prompt, request: Request) -> PrefixHit | None:
        """The longest exact held prefix, cut back to a chunk's start where it would end inside one."""
        if request.reuse == "off":
            return None
        hit = self.prefixes.longest(
            prompt.token_ids,
            fingerprint=self.adapter.fingerprint.digest,
            salt=self.salt,
            limit=prompt.num_tokens - 1,
        )
        if hit is None:
            return None
        n = next((s.start for s in prompt.chunks if s.start < hit.num_tokens < s.end), hit.num_tokens)
        return PrefixHit(hit.held, n, exact=True) if n else None

    def run(self, request: Request) -> Iterator[Piece]:
        """Answer ``request`` piece by piece; the last piece carries the result."""
        with self.busy():
            yield from self._run(request)

    def busy(self) -> AbstractContextManager[None]:
        """While inside, nothing is checked in the background."""
        return self.spot.request() if self.spot else nullcontext()

    def _run(self, request: Request) -> Iterator[Piece]:
        started = perf_counter()
        request, changed = self.guard.admit(request)
        report = Report(reuse=request.reuse, repair=request.repair.label if request.reuse == "chunks" else "none")
        report.warnings += [changed] if changed else []
        if request.cancel.cancelled:  # while it waited in a queue
            yield Piece("", Result("", [], "cancelled", report))
            return
        try:
            prompt, prepared, step = self._prepare(
                request, report, request.max_new_tokens, self.costs, cancel=request.cancel
            )
        except RequestCancelled:
            report.ttft_s = report.total_s = perf_counter() - started
            self.totals.prefilled(report)
            self.totals.answered(report, "cancelled")
            yield Piece("", Result("", [], "cancelled", report))
            return
        self.guard.note(request, report)
        self.totals.prefilled(report)
        watch = self._watch(request, prompt, report)
        step = watch.record(prepared.logits, step) if watch else step
        sampler = Sampler(request.sampling, self.adapter.spec.device, list(request.logits_processors))
        detok = Detokenizer(self.adapter.tokenizer, request.stop)
        ids: list[int] = []
        parts: list[str] = []
        ended = False
        prompt_ids = torch.tensor(prompt.token_ids, device=self.adapter.spec.device)
        for token in token_loop(
            prompt_ids,
            prepared.logits,
            step,
            sampler,
            max_new_tokens=request.max_new_tokens,
            eos_ids=self.eos_ids,
            cancel=request.cancel,
        ):
            if not ids:
                report.ttft_s = perf_counter() - started
            ids.append(token)
            ended = token in self.eos_ids
            text = "" if ended else detok.push(token)
            if text:
                parts.append(text)
                yield Piece(text)
            if detok.stopped:
                break
        tail = detok.finish()
        if tail:
            parts.append(tail)
            yield Piece(tail)
        finished = ended or detok.stopped
        reason = "stop" if finished else "cancelled" if request.cancel.cancelled else "length"
        report.new_tokens = len(ids)
        report.note_cache(prepared.cache.counts())
        entry = held_entry(self.adapter, self.tokens, self.salt, request, prepared, ids)
        if entry is not None:
            self.prefixes.add(entry)
        with report.stage("store"):
            if not request.cancel.cancelled:
                prepared.used.promote(self.store)
                report.stored_tokens = store_missed(self.prefiller.finder, prepared)
                if self.costs is not None and prepared.deal is not None:
                    self.costs.after(prompt, prepared.deal)
            self.prefiller.sweep()
        if watch and self.spot:
            self.spot.offer(watch, ids)
        report.total_s = perf_counter() - started
        self.totals.answered(report, reason)
        yield Piece("", Result("".join(parts), ids, reason, report))

    def _watch(self, request: Request, prompt: Prompt, report: Report) -> Watch | None:
        """What this answer is recorded in, if it is to be checked; exact answers need not be."""
        return self.spot.watch(request, prompt) if self.spot and not report.exact else None

    def score(self, request: Request, continuation: str | list[int], *, logits: bool) -> Score:
        """Teacher-forced log-probabilities of ``continuation`` after the prompt; it never takes part in choosing
        what to repair, and leaves nothing held. It measures what it was asked for, whatever verdict there is on it."""
        started = perf_counter()
        ids = list(self.tokens.plain(continuation)) if isinstance(continuation, str) else list(continuation)
        if not ids:
            raise EmptyPromptError("the continuation is empty")
        self._checked(ids)
        report = Report(reuse=request.reuse, repair=request.repair.label if request.reuse == "chunks" else "none")
        prompt, prepared, step = self._prepare(request, report, len(ids))
        self.totals.prefilled(report)
        report.ttft_s = perf_counter() - started
        rows = [prepared.logits]
        if prepared.plain_cache is not None:  # the model's own cache takes one token at a time
            rows += [step(token, prompt.num_tokens + i) for i, token in enumerate(ids[:-1])]
        elif len(ids) > 1:
            device = self.adapter.spec.device
            n = prompt.num_tokens
            positions = torch.arange(n, n + len(ids) - 1, device=device)
            rows.append(
                self.adapter.forward(torch.tensor(ids[:-1], device=device), positions, prepared.cache, keep_logits=0)
            )
        all_logits = torch.cat(rows).float()
        logprobs = all_logits.log_softmax(-1).gather(1, torch.tensor(ids, device=all_logits.device)[:, None])[:, 0]
        report.note_cache(prepared.cache.counts())
        report.total_s = perf_counter() - started
        return Score(ids, logprobs.cpu(), report, all_logits.cpu() if logits else None)

    def _prepare(
        self,
        request: Request,
        report: Report,
        new_tokens: int,
        costs: CostModel | None = None,
        cancel: CancelToken | None = None,
    ) -> tuple[Prompt, Prepared, Step]:
        if request.reuse != "off":
            self.adapter.require_reuse()
        prompt, hit = self.segment(request, report)
        self._check_length(prompt.num_tokens, new_tokens, request)
        self._warn_unmatched(request, prompt, report)
        if not self.adapter.runs_own_cache(prompt.num_tokens + new_tokens):
            prepared, step = plain_prefill(self.adapter, prompt, report)
            return prompt, prepared, step
        prepared = self.prefiller.prepare(
            prompt, hit, request.repair, prompt.num_tokens + new_tokens, report, costs, cancel
        )
        return prompt, prepared, cached_step(self.adapter, prepared.cache)

    def _check_length(self, prompt: int, new: int, request: Request) -> None:
        window = self.adapter.spec.window if request.reuse == "off" else self.adapter.max_tokens
        if prompt + new > window:
            why = self.adapter.support.limit_reason if window < self.adapter.spec.window else ""
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and max_new_tokens is {new}: together more than the window of {window}"
                + (f" ({why})" if why else ""),
                hint=f"shorten the prompt or ask for at most {max(0, window - prompt)} new tokens",
            )

    def _warn_unmatched(self, request: Request, prompt: Prompt, report: Report) -> None:
        if request.reuse != "chunks":
            return
        if prompt.unmatched:
            report.warnings.append(
                f"{len(prompt.unmatched)} of {len(request.chunks)} given chunks do not stand verbatim in the prompt: "
                f"{prompt.unmatched[0][:60]!r}… (check for escaping, str() of a list, or truncation)"
            )
        for text in prompt.refused:
            report.warnings.append(f"not reused, the tokenizer does not give this text back: {text[:60]!r}…")
        if prompt.chunks:
            return
        if request.chunks or (len(self.store.anchors) and prompt.num_tokens >= LONG_PROMPT_TOKENS):
            self._once.warn(
                "no chunk matched",
                f"no known chunk was found in a prompt of {prompt.num_tokens} tokens although "
                f"{len(self.store.anchors)} are known; is the text changed on its way "
                "(repr, escaping, another splitter)?",
            )
