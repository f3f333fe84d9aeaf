"""Part ``reuse`` of ``gpu_check.py``: time to first token, with blocks in ordinary memory, carried, and on the card."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from common import spread
from gpu_machine import GIB, Machine, Notes, chunk_pool, dense_model, tokenizer

from kvboost_rag import KVBoost
from kvboost_rag.model.streaming.load import choose_backend
from kvboost_rag.model.streaming.pagelocked import PageLocked
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.store import DeviceStore

TTFT_RATIO = 1.25  # to reach: of the exact-prefix floor


def ttft(
    model: Any, *, chunks: int, tokens: int, queries: int, backend: Any = None, ordinary: bool = False, vram: int = 0
) -> dict[str, Any]:
    """Time to first token over ``chunks`` warm chunks in changing order, against a full prefill and against the floor
    (the whole context already in place: only the question is forwarded). One more order goes first, unmeasured: kernels
    are built and buffers found then. ``ordinary``: and over blocks in ordinary memory, copied before the forward;
    ``vram``: and over blocks in a tier of so many bytes on the device, where the unmeasured order brings them."""
    tok = tokenizer()
    options: dict[str, Any] = {"memory_bytes": 8 * GIB, "prefix_bytes": 0, "kv_backend": backend}
    engine = KVBoost(model, tok, store="memory", **options)
    floor = KVBoost(model, tok, store=None, reuse="prefix", prefix_bytes=1 << 36)
    pool = chunk_pool(chunks, tokens)
    warmed = engine.warm(pool)
    before = _ordinary(engine, pool, options) if ordinary else None
    near, tier = engine, None
    if vram:
        tier = DeviceStore(vram, engine.adapter.spec.device)
        near = KVBoost(model, tok, store=engine.store, store_vram=tier, prefix_bytes=0)
    promote_s = 0.0
    rows: dict[str, list[float]] = {}
    forwarded: dict[str, float] = {}
    stages: dict[str, dict[str, float]] = {}
    for query in range(-1, queries):
        context = "\n\n".join(pool[::-1] if query < 0 else pool[query:] + pool[:query])
        prompt = f"{context}\n\nQuestion {query}: which river?"
        floor.generate(f"{context}\n\nSomething else.", max_new_tokens=1)
        runs = {
            "full": (engine, {"reuse": "off"}), "fast": (engine, {"repair": "fast"}), "balanced": (engine, {}),
            "floor": (floor, {}),
        }  # fmt: skip
        if before is not None:
            runs |= {"fast_ordinary": (before, {"repair": "fast"}), "balanced_ordinary": (before, {})}
        if tier is not None:
            runs |= {"fast_vram": (near, {"repair": "fast"}), "balanced_vram": (near, {})}
        for name, (who, how) in runs.items():
            report = who.generate(prompt, max_new_tokens=1, **how).report
            if query < 0 and name == "fast_vram":
                promote_s = report.stages.get("store", 0.0)
            if query >= 0:
                rows.setdefault(name, []).append(report.ttft_s)
            forwarded[name], stages[name] = report.forwarded_tokens, dict(report.stages)
        floor.forget()
    times = {name: spread(values) for name, values in rows.items()}
    over_floor = {name: t["median"] / times["floor"]["median"] for name, t in times.items()}
    more: dict[str, Any] = {}
    if tier is not None:
        more = {
            "reached_vram": over_floor["fast_vram"] <= TTFT_RATIO,
            "promote_s": promote_s,
            "tier": tier.stats().as_dict(),
        }
        tier.close()
    return {
        "context_tokens": chunks * tokens, "ttft_s": times, "over_floor": over_floor, "forwarded_tokens": forwarded,
        "reached": over_floor["fast"] <= TTFT_RATIO, "warm_tokens_per_s": warmed.tokens_per_s,
        "carrier": engine.stats()["carrier"], **more,
        "last_stages_s": stages,  # of the host: where work is only enqueued, a stage's seconds are the next one's
    }  # fmt: skip


def _ordinary(engine: KVBoost, pool: list[str], options: dict[str, Any]) -> KVBoost:
    """An engine over the same blocks in ordinary memory, which are copied before a forward."""
    other = KVBoost(engine.model, engine.tokenizer, store="memory", carry=False, **options)
    for key in engine.store.keys():  # noqa: SIM118 - a store is not a dict
        block: Any = engine.store.get(key)
        other.store.put(replace(block, kv=block.kv.clone()))
    other.warm(pool)  # makes the texts known
    return other


def reuse(machine: Machine, notes: Notes) -> None:
    """Time to first token on 7B-shaped resident weights, 4k to 32k tokens; blocks page-locked and carried while the
    forward runs, in ordinary memory, and on the device."""
    notes.add(bus=_bus(machine))
    model = dense_model(machine)
    backend = VirtualBackend() if machine.smoke else None
    options: dict[str, Any] = {"queries": 3, "backend": backend, "ordinary": True, "vram": 8 * GIB}
    for chunks, tokens in ((2, 32),) if machine.smoke else ((8, 512), (16, 512), (32, 512), (64, 512)):
        notes.try_to(f"{chunks}x{tokens}", lambda c=chunks, n=tokens: ttft(model, chunks=c, tokens=n, **options))


def _bus(machine: Machine) -> dict[str, float]:
    """Host to device in GB/s, from ordinary and from page-locked memory: what laying blocks can cost at best. And how
    fast blocks are page-locked, which warm-up pays for."""
    nbytes = (1 << 20) if machine.smoke else (64 << 20)
    target = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    sources = {"pageable": torch.ones(nbytes, dtype=torch.uint8)}
    if not machine.smoke:
        sources["page_locked"] = sources["pageable"].pin_memory()
    found = {name: nbytes / machine.seconds(lambda s=s: target.copy_(s)) / 1e9 for name, s in sources.items()}
    allocate = PageLocked(VirtualBackend() if machine.smoke else choose_backend(machine.device, None))
    started = time.perf_counter()
    blocks = [allocate(nbytes).fill_(1) for _ in range(4)]
    found["page_locking"] = len(blocks) * nbytes / (time.perf_counter() - started) / 1e9
    return {**found, **allocate.held()}
