"""What an engine has done so far, in plain values."""

from __future__ import annotations

from dataclasses import asdict

from kvboost_rag.engine.engine import Engine
from kvboost_rag.model.streaming.streamer import streamer_of
from kvboost_rag.store.base import BlockStore


def figures(engine: Engine, store: BlockStore, *, sizes: bool) -> dict[str, object]:
    """See ``KVBoost.stats``. ``sizes``: count a server's blocks too."""
    adapter, prefixes = engine.adapter, engine.prefixes
    pages, streamer = adapter.pages, streamer_of(adapter.model)
    return {
        "store": (store.stats() if sizes else store.quick_stats()).as_dict(),
        "requests": engine.totals.as_dict(),
        "prefixes": {"entries": len(prefixes), "bytes": prefixes.nbytes, "limit_bytes": prefixes.limit_bytes},
        "streaming": streamer.stats.as_dict() if streamer else None,
        "attention": {"kernel": adapter.kernel.name, "reason": adapter.kernel.reason},
        "encoding": {**asdict(adapter.encoded), "packed_kernel": adapter.packed.name},
        "paged": pages.snapshot().as_dict() if pages is not None else None,
        "carrier": engine.carrier.stats() if engine.carrier else None,
        "cost": engine.costs.as_dict() if engine.costs else None,
        "spot": engine.spot.stats() if engine.spot else None,
    }
