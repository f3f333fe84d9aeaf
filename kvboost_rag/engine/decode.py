"""The token loop over a prepared cache. The first token comes from the repair forward's own logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from kvboost_rag.engine.sample import Sampler
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.cache import KVCache

Step = Callable[[int, int], torch.Tensor]  # (token id, its position) -> logits [1, vocab]


class CancelToken:
    """Lets another thread end a running generation after the token in progress. One token may serve several requests;
    a token with a ``parent`` is cancelled with it, not the other way round."""

    def __init__(self, parent: CancelToken | None = None) -> None:
        self._event = threading.Event()
        self._parent = parent

    def cancel(self) -> None:
        """Ask the generation to stop."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked."""
        return self._event.is_set() or (self._parent is not None and self._parent.cancelled)


class RequestCancelled(Exception):
    """A request was cancelled before its first token, while it waited for blocks."""


def cached_step(adapter: ModelAdapter, cache: KVCache) -> Step:
    """One decoding step over our own cache."""

    def step(token_id: int, position: int) -> torch.Tensor:
        device = adapter.spec.device
        ids = torch.tensor([token_id], device=device)
        return adapter.forward(ids, torch.tensor([position], device=device), cache)

    return step


def token_loop(
    prompt_ids: torch.Tensor,
    logits: torch.Tensor,
    step: Step,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    cancel: CancelToken,
) -> Iterator[int]:
    """Yield new ids one by one; an end-of-sequence id is yielded and ends the loop. The id that was yielded last has
    no KV yet: it is forwarded only when the consumer asks for another."""
    n = prompt_ids.numel()
    ids = torch.empty(n + max_new_tokens, dtype=torch.long, device=prompt_ids.device)
    ids[:n] = prompt_ids
    for count in range(max_new_tokens):
        if cancel.cancelled:
            return
        token = sampler.next(ids[: n + count], logits)
        ids[n + count] = token
        yield token
        if token in eos_ids or count + 1 == max_new_tokens or cancel.cancelled:
            return
        logits = step(token, n + count)


def end_ids(adapter: ModelAdapter) -> frozenset[int]:
    """Every id that ends a generation: the generation config's, the config's and the tokenizer's."""
    generation = getattr(adapter.model, "generation_config", None)
    found: set[int] = set()
    for source in (
        getattr(generation, "eos_token_id", None),
        getattr(adapter.model.config, "eos_token_id", None),
        adapter.tokenizer.eos_token_id,
    ):
        if source is not None:
            found.update(source if isinstance(source, (list, tuple)) else [source])
    return frozenset(int(i) for i in found)
