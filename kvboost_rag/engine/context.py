"""What blocks are computed after: the canonical context, or a prompt's own head.

A key in the middle of a long prompt looks different from one near its start, and a lone chunk's first tokens become
attention sinks. So a block is computed after a canonical head and a few hundred tokens of neutral prose, both dropped
from the block (relatives: Star Attention's anchor block 2411.17116, APE's shared prefix 2502.05431). What the prose
says hardly matters, that it is prose does; ``docs/correctness.md`` has the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from kvboost_rag.engine.render import canonical_head_text, render_chat
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import StoreError, UsageError
from kvboost_rag.keys import context_digest
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.store.base import BlockStore

FILLER_TOKENS = 200
CHUNK_BREAK = "\n\n"
MAX_WINDOW_SHARE = 0.25  # the context may take this much of the model's window


def shipped_filler() -> str:
    """The neutral English prose that comes with the package."""
    return resources.files("kvboost_rag.data").joinpath("filler.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Context:
    """Token ids that blocks are computed after; ``kind`` is ``"canonical"`` or ``"head"``."""

    kind: str
    token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The context field of block keys."""
        return context_digest(self.token_ids)


def canonical_context(
    adapter: ModelAdapter,
    tokens: SpanTokenizer,
    store: BlockStore,
    filler: str | None,
    filler_tokens: int,
    *,
    alone: bool = False,
) -> Context:
    """The canonical context of this model in this store; frozen in the store's manifest by whoever comes first.

    ``alone`` is no context at all: the naive baseline, for measuring.

    Raises:
        UsageError: the given filler has no text, or its length is negative.
        StoreError: the manifest entry is not readable.
    """
    if filler_tokens < 0:
        raise UsageError(f"filler_tokens must be 0 or more, got {filler_tokens!r}")
    if alone:
        return Context("canonical", ())
    text = shipped_filler() if filler is None else filler
    if not text.strip() and filler_tokens:
        raise UsageError("the filler text is empty", hint="give a few hundred words of prose in the corpus's language")
    ids = _build(adapter, tokens, text, filler_tokens)
    name = f"context:{adapter.fingerprint.digest}:{context_digest(tokens.plain(text))}:{filler_tokens}"
    held = store.put_meta(name, json.dumps(list(ids)).encode())
    try:
        return Context("canonical", tuple(int(i) for i in json.loads(held)))
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"the store's manifest entry {name!r} is not a list of token ids", hint="run `kvboost-rag store check`"
        ) from error


def _build(adapter: ModelAdapter, tokens: SpanTokenizer, filler: str, filler_tokens: int) -> tuple[int, ...]:
    head_text = canonical_head_text(adapter.tokenizer)
    head = tokens.leading(head_text) + tokens.literal(head_text, first=True)
    most = int(adapter.max_tokens * MAX_WINDOW_SHARE)
    if not head or len(head) > most:  # no template, or a tiny window: a bare start token, if there is one
        start = adapter.tokenizer.bos_token_id
        head = () if start is None else (int(start),)
    room = max(0, most - len(head))
    size = min(filler_tokens, room)
    prose = tokens.plain(filler) if size else ()
    while prose and len(prose) < size:
        prose += prose
    end = tokens.plain(CHUNK_BREAK)  # a chunk begins after a break in prompts too (docs/log.md: helps everywhere)
    return head + (prose[: size - len(end)] + end if prose and size > len(end) else ())


def compute_context_kv(adapter: ModelAdapter, context: Context) -> torch.Tensor:
    """Rotated KV of a context: ``[num_layers, 2, num_kv_heads, num_context, head_dim]``."""
    n = len(context.token_ids)
    cache = adapter.new_buffer(n)
    if n:
        ids = torch.tensor(context.token_ids, device=adapter.spec.device)
        adapter.forward(ids, torch.arange(n, device=adapter.spec.device), cache)
    return cache.kv


def head_context(tokens: SpanTokenizer, head: str | Sequence[Mapping[str, Any]]) -> Context:
    """The context of own-head blocks, from what a user calls the head.

    ``head`` is the system prompt of a chat (a string), or messages whose last content ends where the first chunk
    begins, or the rendered head itself (a string that spells the template's own tokens, or any string where the
    tokenizer has no chat template).

    Raises:
        UsageError: the head is empty, or the template puts the content elsewhere.
    """
    tokenizer = tokens.tokenizer
    if isinstance(head, str):
        if not head:
            raise UsageError("the head is empty", hint="leave head= out to use the canonical context alone")
        if not getattr(tokenizer, "chat_template", None) or tokens.has_added_token(head):
            return Context("head", tokens.leading(head) + tokens.literal(head, first=True))
        head = [{"role": "system", "content": head}, {"role": "user", "content": ""}]
    messages = [dict(m) for m in head]
    if not messages:
        raise UsageError("the head is an empty list of messages")
    mark = "\ue000head\ue001"
    messages[-1]["content"] = str(messages[-1].get("content") or "") + mark
    text = render_chat(tokenizer, messages).text
    if mark not in text:
        raise UsageError("the chat template does not show the last message's content", hint="give the rendered text")
    before = text.split(mark)[0]
    return Context("head", tokens.leading(before) + tokens.literal(before, first=True))
