"""What a request leaves in the store, after its answer."""

from __future__ import annotations

import logging

from kvboost_rag.engine.lookup import BlockFinder
from kvboost_rag.engine.prefill import Prepared
from kvboost_rag.errors import ModelError
from kvboost_rag.kv.block import Block
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
        if store.put(block):
            encoder.register([(segment.text, block.key)])
            stored += len(ids)
    return stored


def _bring_near(store: BlockStore, key: str) -> bool:
    """Whether the store has ``key``; if so, in its nearest tier from now on."""
    return store.contains(key) and (store.tier_of(key) == 0 or isinstance(store.get(key), Block))
