"""Blocks as rivals compute them, put into a store in place of an engine's own.

All serve an engine that computes blocks alone (``alone=True``): a block made otherwise is told under that engine's key.

* ``own-head``: after the prompt's own head (APE's shared prefix).
* ``dummies``: after four dummy tokens whose KV is dropped (LegoLink-0, 2410.15332).
* ``kamera-R``: alone, plus a low-rank patch that was stored beside the chunk at warm-up: our reading of an *abstract*
  (Kamera, 2606.23581), which says that a chunk carries a training-free low-rank conditioning patch, the difference of
  its KV between alone and in context. Which context, it does not say: here the same chunk behind the passages of another
  question. Rank R per layer, for K and for V, over all heads (``[tokens, heads * head_dim]``); ``full`` does not cut.
* ``kamera-R-own``: the same with the request's own context, which a warm-up cannot know: the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from fidelity_data import Item, head_messages
from rival_prompt import Spans

from kvboost_rag import KVBoost

DUMMIES = 4


class RivalBlocks:
    """The blocks of one item, each kind computed once. ``engine`` computes alone; ``other``: another item's passages;
    ``spans``: the prompt of the item itself, for what only an oracle knows."""

    def __init__(self, engine: KVBoost, item: Item, other: Sequence[str], spans: Spans, style: str) -> None:
        self.engine, self.item, self.other, self.spans, self.style = engine, item, other, spans, style

    def of(self, kind: str) -> list[Any]:
        """Blocks of a kind (see the module's text), in the order of the item's passages.

        Raises:
            SystemExit: an unknown kind, or there is no other item to take a context from.
        """
        if kind == "own-head":
            return self._after(head_messages(style=self.style))
        if kind == "dummies":
            return self._after(self._dummy_text())
        name, _, rest = kind.partition("-")
        rank, _, own = rest.partition("-")
        if name != "kamera" or own not in ("", "own") or not (rank == "full" or rank.isdigit()):
            raise SystemExit(f"unknown kind of blocks {kind!r}")
        parts = self._own_patch if own else self._patch
        return [
            self._patched(a, p, None if rank == "full" else int(rank)) for a, p in zip(self.alone, parts, strict=True)
        ]

    def fill(self, store: Any, kind: str) -> None:
        """Put the blocks of a kind into ``store``, alone."""
        store.clear()
        for block in self.of(kind):
            assert store.put(block), "the store must take the block"

    @cached_property
    def alone(self) -> list[Any]:
        encoder = self.engine.encoder()
        return list(encoder.encode([encoder.tokenize(p) for p in self.item.passages]))

    def _after(self, head: Any) -> list[Any]:
        """Each chunk after a head, under the keys of blocks computed alone."""
        encoder = self.engine.encoder(head)
        made = encoder.encode([tuple(b.token_ids) for b in self.alone], context=encoder.contexts()[-1])
        return [replace(alone, kv=block.kv) for alone, block in zip(self.alone, made, strict=True)]

    def _dummy_text(self) -> str:
        """Four start tokens; the tokenizer's own first special token where there is none."""
        tokenizer = self.engine.tokenizer
        return str(tokenizer.bos_token or tokenizer.eos_token) * DUMMIES

    @cached_property
    def _patch(self) -> list[tuple[torch.Tensor, ...]]:
        if not self.other:
            raise SystemExit("a conditioning patch is measured behind another item's passages: take at least two items")
        behind = head_messages(self.other, style=self.style)
        return [_decomposed(b.kv - a.kv) for a, b in zip(self.alone, self._after(behind), strict=True)]

    @cached_property
    def _own_patch(self) -> list[tuple[torch.Tensor, ...]]:
        adapter, ids = self.engine.adapter, torch.tensor(self.spans.token_ids)
        cache = adapter.new_buffer(len(ids))
        adapter.forward(ids.to(adapter.spec.device), torch.arange(len(ids), device=adapter.spec.device), cache)
        true = cache.kv.cpu().clone()
        true[:, 0] = adapter.rope.unrotate(cache.kv[:, 0], 0).cpu()
        slices = [true[:, :, :, s:e] for s, e in self.spans.chunks]
        return [_decomposed(t - a.kv) for a, t in zip(self.alone, slices, strict=True)]

    @staticmethod
    def _patched(alone: Any, parts: tuple[torch.Tensor, ...], rank: int | None) -> Any:
        u, s, vh = parts
        heads, dim = alone.kv.shape[2], alone.kv.shape[4]
        low = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]  # [L, 2, n, heads * dim]
        patch = low.unflatten(-1, (heads, dim)).transpose(2, 3)
        return replace(alone, kv=(alone.kv + patch).contiguous())


def _decomposed(delta: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Singular value decomposition per layer, of K and of V: ``delta [L, 2, heads, n, dim]`` over ``[n, heads * dim]``."""
    return tuple(torch.linalg.svd(delta.transpose(2, 3).flatten(3).float(), full_matrices=False))
