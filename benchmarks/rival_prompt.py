"""A prompt on a rival's terms: blocks laid into a cache, chosen rows forwarded, an answer scored or decoded after it.

Methods of other papers that the engine does not offer run here, over the same model calls, token ids and blocks as the
engine's own policies. A method says which tokens of the chunks to recompute, what corrects cached KV on the way
(a *reviser*), and how rows attend (a *plan*); see ``kvboost_rag``'s ``model/cache.py`` and ``model/attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from kvboost_rag import KVBoost, Report


@dataclass(frozen=True, slots=True)
class Spans:
    """Token ids of a prompt and the chunks' ``[start, end)`` in it, as the engine cuts them."""

    token_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def question(self) -> int:
        """Where what follows the last chunk starts."""
        return self.chunks[-1][1]


def spans_of(engine: KVBoost, prompt: Sequence[Any], passages: Sequence[str], report: Report) -> Spans:
    """The engine's own segmentation of ``prompt``, made again from its text and checked against ``report``.

    Raises:
        RuntimeError: the engine cut the prompt otherwise.
    """
    tokens, text = engine.tokens, engine.render(prompt)
    ids, chunks = list(tokens.leading(text)), []
    first = True
    for passage in passages:
        before, text = text.split(passage.strip(), 1)
        ids += tokens.literal(before, first=first)
        chunk = tokens.chunk(passage.strip())
        assert chunk is not None, "the tokenizer must give a passage's text back"
        chunks.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
        first = False
    ids += tokens.literal(text)
    if len(ids) != report.prompt_tokens or chunks != [(c.start, c.end) for c in report.chunks]:
        raise RuntimeError("the engine cuts this prompt into other spans")
    return Spans(tuple(ids), tuple(chunks))


class Method(Protocol):
    """What a rival does with a laid prompt."""

    def choose(self, laid: Laid) -> list[int]:
        """Positions of chunks to recompute; may run the model on its own (``laid.cache.rows`` counts)."""
        ...

    def reviser(self, laid: Laid, chosen: list[int]) -> Any:
        """What corrects cached KV inside the forward, or None."""
        ...

    def plan(self, laid: Laid, positions: torch.Tensor) -> Any:
        """How rows at ``positions`` attend, or None for plainly causal."""
        ...


class Laid:
    """One prompt, its cache filled by ``method`` from ``blocks`` (one per chunk, in order). ``room``: tokens of the
    longest answer that will follow."""

    def __init__(self, engine: KVBoost, spans: Spans, blocks: Sequence[Any], method: Method, *, room: int) -> None:
        started = perf_counter()
        self.engine, self.spans, self.method = engine, spans, method
        self.adapter = engine.adapter
        self.device = self.adapter.spec.device
        self.n = len(spans.token_ids)
        self.ids = torch.tensor(spans.token_ids, device=self.device)
        self.cache = self.adapter.new_buffer(self.n + room)
        self.cache.kv.zero_()  # fresh memory may hold NaN, which no mask stops
        self._lay(blocks)
        chosen = method.choose(self)
        self.repaired_share = len(chosen) / sum(e - s for s, e in spans.chunks)
        self.logits = self._prefill(chosen)  # [1, vocab], of the last token
        self.ttft_s = perf_counter() - started
        self.forwarded = self.cache.rows

    def _lay(self, blocks: Sequence[Any]) -> None:
        for (start, end), block in zip(self.spans.chunks, blocks, strict=True):
            assert tuple(block.token_ids) == self.spans.token_ids[start:end], "a block of other tokens"
            target = self.cache.kv[:, :, :, start:end]
            self.adapter.rope.rotate_into(target[:, 0], block.kv[:, 0], start)
            target[:, 1].copy_(block.kv[:, 1])

    def _prefill(self, chosen: list[int]) -> torch.Tensor:
        rows = torch.ones(self.n, dtype=torch.bool)
        for start, end in self.spans.chunks:
            rows[start:end] = False
        rows[chosen] = True
        positions = rows.nonzero().flatten().to(self.device)
        with self.cache.revised_by(self.method.reviser(self, chosen)):
            return self._forward(self.ids[positions], positions, keep=1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, *, keep: int) -> torch.Tensor:
        plan = self.method.plan(self, positions)
        return self.adapter.forward(ids, positions, self.cache, keep_logits=keep, plan=plan)

    def along(self, answer: Sequence[int]) -> torch.Tensor:
        """Logits ``[len(answer), vocab]``, teacher-forced: row i is that in front of token i."""
        if len(answer) == 1:
            return self.logits.float()
        self.cache.length = self.n
        positions = torch.arange(self.n, self.n + len(answer) - 1, device=self.device)
        ids = torch.tensor(list(answer[:-1]), device=self.device)
        return torch.cat([self.logits, self._forward(ids, positions, keep=0)]).float()

    def greedy(self, max_new_tokens: int) -> list[int]:
        """New ids, an end-of-sequence id included."""
        self.cache.length = self.n
        logits, out = self.logits, []
        for position in range(self.n, self.n + max_new_tokens):
            out.append(int(logits[-1].argmax()))
            if out[-1] in self.engine.engine.eos_ids or len(out) == max_new_tokens:
                break
            at = torch.tensor([position], device=self.device)
            logits = self._forward(torch.tensor(out[-1:], device=self.device), at, keep=1)
        return out
