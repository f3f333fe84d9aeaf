"""What a request leaves behind after its answer: blocks in the store, and its KV for later turns."""

from __future__ import annotations

import logging

from kvboost_rag.chunk import Prompt, Segment
from kvboost_rag.engine.lookup import BlockFinder
from kvboost_rag.engine.prefill import Prepared
from kvboost_rag.engine.prefix import Held
from kvboost_rag.engine.request import Request
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import ModelError
from kvboost_rag.kv.block import Block
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.store.base import BlockStore
from kvboost_rag.store.null import NullStore

log = logging.getLogger("kvboost_rag")


def store_missed(finder: BlockFinder, prepared: Prepared) -> int:
    """Encode and store the chunks that were missed; returns their tokens. Of those that were recomputed because that
    was cheaper, the stored ones move to the nearest tier: it may not be cheaper next time."""
    encoder, store = finder.encoder, finder.store
    if isinstance(store, NullStore):  # nobody keeps what would be computed
        return 0
    stored = 0
    seen: set[tuple[int, ...]] = set()
    skipped = [s for s in prepared.skipped if not _bring_near(store, finder.key(s))]
    for segment in [*prepared.missed, *skipped]:
        ids = segment.token_ids
        if segment.cut or ids in seen or len(ids) > encoder.max_chunk_tokens:
            continue
        seen.add(ids)
        try:
            block = encoder.encode([ids], texts=[segment.text])[0]
        except ModelError as error:  # the answer is there already
            log.warning("a chunk was not stored: %s", error)
            continue
        since = store.deletions
        if store.put(block):
            store.promote([block], since, prepared.used.near)
            prepared.used.near.append(block.key)
            encoder.register([(segment.text, block.key)])
            stored += len(ids)
    return stored


def _bring_near(store: BlockStore, key: str) -> bool:
    """Whether the store has ``key``; if so, in its nearest tier from now on."""
    if not store.contains(key) or store.tier_of(key) == 0:
        return store.contains(key)
    since = store.deletions
    found = store.get(key)
    if isinstance(found, Block):
        store.promote([found], since)
    return isinstance(found, Block)


def held_entry(
    adapter: ModelAdapter, tokens: SpanTokenizer, salt: str, request: Request, prepared: Prepared, ids: list[int]
) -> Held | None:
    """What this request computed, for later turns and repeated prompts; ``ids`` are the answer's tokens."""
    if request.reuse == "off" or prepared.plain_cache is not None:
        return None
    prompt = prepared.prompt
    answer = tuple(ids[:-1])  # the last id was never forwarded
    text = _held_text(tokens, prompt, answer)
    exact = prepared.exact_tokens
    if exact == prompt.num_tokens:
        exact += len(answer)
    segments = prompt.segments
    if answer:
        segments += (Segment("glue", text[len(prompt.text) :], answer, prompt.num_tokens),)
    return Held(
        fingerprint=adapter.fingerprint.digest,
        salt=salt,
        policy=request.repair.recipe,
        text=text,
        segments=segments,
        token_ids=prompt.token_ids + answer,
        exact_tokens=exact,
        kv=prepared.cache.held(),
        prompt_chars=len(prompt.text),
        contents=prompt.contents,
    )


def _held_text(tokens: SpanTokenizer, prompt: Prompt, answer: tuple[int, ...]) -> str:
    """Text of prompt and answer; "" where it can't be continued by text. An answer that ends inside a character
    can't, nor one with control tokens of its own: a later prompt spells them in a message, where they are none."""
    if not prompt.text or not tokens.is_plain(answer):
        return ""
    return prompt.text + tokens.prefix_text(answer)
