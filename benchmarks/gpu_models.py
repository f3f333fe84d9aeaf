"""Parts of ``gpu_check.py`` over whole models: streaming, attention end to end, pages, packing."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from common import spread
from gpu_machine import GIB, Machine, Notes, RandomFiles, TokenClock, chunk_pool, dense_model, tokenizer
from gpu_parts import attention_operation
from gpu_reuse import ttft

from kvboost_rag import KVBoost
from kvboost_rag.model.streaming.load import choose_backend, load_streamed, resolve_budget
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import Budget, KVBudget
from kvboost_rag.warmup.batch import group

HOST = 64 * GIB  # what the streamed model may take at most: 13.7 GB
STREAMED_SHARE = 0.85  # to reach: of the bus's bound


# --- streaming --------------------------------------------------------------------------------------------------


def streaming(machine: Machine, notes: Notes) -> None:
    """A 32B-shaped AWQ model under an enforced cap of 8 GiB: tokens/s against the bound that the measured bus gives, and
    time to first token with and without chunk reuse."""
    config = machine.config("qwen2.5-32b", awq=True)
    if machine.smoke:
        backend: Any = VirtualBackend()
        budget = Budget(vram=4 << 20, context=256, reserve=0, workspace=0, held_tokens=64)
    else:
        backend = choose_backend(machine.device, None)
        # Some machines' memory grows as it is used: what is free now says little.
        budget = resolve_budget(Budget(vram=8 * GIB, held_tokens=264, host=HOST), backend)
        notes.add(device_used_before=_memory(machine)["device_used"])
        notes.add(cap=_cap(8 * GIB - budget.reserve))
    started = time.perf_counter()
    files = RandomFiles(config)
    model = load_streamed(files.folder, config, dtype=machine.dtype, budget=budget, backend=backend, files=files)
    plan, streamer = model.kvboost_plan, model.kvboost_streamer
    probed = streamer.stats.probed_gb_per_s
    bound = plan.tokens_per_s(probed * 1e9) if probed else None
    notes.add(load_s=time.perf_counter() - started, plan=plan.as_dict(), probed_gb_per_s=probed, bound=bound)
    decoded = notes.try_to("decode", lambda: _decode(model, 6 if machine.smoke else 24))
    if bound and "tokens_per_s" in decoded:
        share = decoded["tokens_per_s"] / bound
        notes.add(share_of_bound=share, reached=share >= STREAMED_SHARE)
    notes.add(streamer=streamer.stats.as_dict(), memory=_memory(machine))
    sizes = {"chunks": 2, "tokens": 32} if machine.smoke else {"chunks": 6, "tokens": 256}
    notes.try_to("ttft", lambda: ttft(model, **sizes, queries=2))
    notes.add(streamer=streamer.stats.as_dict(), memory=_memory(machine))


def _cap(nbytes: int) -> dict[str, Any]:
    """Nothing beyond ``nbytes`` can be allocated from here on; tried out."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory, 0)
    try:
        torch.empty(nbytes + (64 << 20), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return {"bytes": nbytes, "holds": True}
    return {"bytes": nbytes, "holds": False, "error": "more than the cap could be allocated"}


def _memory(machine: Machine) -> dict[str, int]:
    """What torch had allocated and reserved at most, and what the device has given to everybody now."""
    if machine.smoke:
        return {}
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_allocated": allocated, "peak_reserved": reserved, "device_used": total - free}


def _decode(model: Any, steps: int) -> dict[str, Any]:
    engine = KVBoost(model, tokenizer(), store=None, reuse="off", prefix_bytes=0)
    clock = TokenClock()
    options: dict[str, Any] = {"max_new_tokens": steps + 3, "logits_processors": [clock]}
    for _ in engine.stream("The river passes under seven bridges.", **options):
        pass
    steady = [b - a for a, b in itertools.pairwise(clock.times[2:])]
    return {"tokens_per_s": 1 / spread(steady)["median"], "seconds_per_token": spread(steady)}


# --- attention, end to end --------------------------------------------------------------------------------------


def attention(machine: Machine, notes: Notes) -> None:
    """Attention as an operation, then whole prefills of a 7B-shaped model: transformers' eager and SDPA, and ours."""
    notes.add(operation=attention_operation(machine))
    model = dense_model(machine)
    sizes = {"eager": (128,), "sdpa": (128,), "ours": (128,)}
    if not machine.smoke:
        sizes = {"eager": (4096, 8192), "sdpa": (4096, 8192, 16384), "ours": (4096, 8192, 16384)}
    for name, lengths in sizes.items():
        for n in lengths:
            notes.try_to(f"prefill_{name}_{n}", lambda a=name, m=n: _prefill(machine, model, a, m))


def _prefill(machine: Machine, model: Any, attn: str, tokens: int) -> dict[str, Any]:
    ids = torch.randint(10, 900, (1, tokens), device=machine.device)
    engine = KVBoost(model, tokenizer(), store=None, reuse="off", prefix_bytes=0)
    if attn == "ours":
        positions = torch.arange(tokens, device=machine.device)

        def run() -> Any:
            return engine.adapter.forward(ids[0], positions, engine.adapter.new_buffer(tokens))
    else:
        model.set_attn_implementation(attn)

        @torch.inference_mode()
        def run() -> Any:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

    kernel = engine.stats()["attention"] if attn == "ours" else attn
    return {"kernel": kernel, "seconds": machine.seconds(run, 3), "peak_bytes": machine.peak(run)}


# --- pages ------------------------------------------------------------------------------------------------------


def paged(machine: Machine, notes: Notes) -> None:
    """KV of four times its budget against one buffer, over warm chunks: difference in logits, and time per token."""
    model, tok = dense_model(machine), tokenizer()
    chunks, tokens = (4, 64) if machine.smoke else (16, 512)
    pool = chunk_pool(chunks, tokens)
    prompt = "\n\n".join(pool) + "\n\nQuestion: which river?"
    whole = KVBoost(model, tok, store="memory", memory_bytes=8 * GIB, prefix_bytes=0)
    per_token = whole.adapter.spec.bytes_per_token
    budget = KVBudget(chunks * tokens * per_token // 4, page_tokens=8 if machine.smoke else 64)
    pages = KVBoost(model, tok, store="memory", memory_bytes=8 * GIB, prefix_bytes=0, kv_vram=budget)
    notes.add(context_tokens=chunks * tokens, kv_vram=budget.nbytes, kv_over_budget=4.0)
    logits, answers = {}, {}
    for name, engine in (("whole", whole), ("paged", pages)):
        engine.warm(pool)
        engine.engine.eos_ids = frozenset()
        engine.generate(prompt, max_new_tokens=2)
        machine.sync()
        result = engine.generate(prompt, max_new_tokens=32)
        report, answers[name] = result.report, result.token_ids
        logits[name] = engine.score(prompt, list(range(40, 80)), logits=True).logits
        notes.add(**{name: {
            "ttft_s": report.ttft_s, "seconds_per_token": (report.total_s - report.ttft_s) / 31,
            "host_tokens": report.host_tokens, "spilled_pages": report.spilled_pages,
        }})  # fmt: skip
    gap = (logits["paged"] - logits["whole"]).abs().max() / logits["whole"].abs().max()
    same = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(*answers.values(), strict=True)))
    found: Any = pages.stats()["paged"]
    # Half precision breaks ties either way: tokens are compared exactly in the tests, in fp32.
    ok = bool(torch.isfinite(gap)) and float(gap) < 0.05 and found["spilled_pages"] + found["placed_pages"] > 0
    notes.add(relative_logit_error=float(gap), same_tokens=same, of_tokens=32, stats=found, ok=ok)


# --- packing ----------------------------------------------------------------------------------------------------


def packing(machine: Machine, notes: Notes) -> None:
    """Warm-up chunks of uneven lengths, packed and padded: tokens/s, the difference, and whether a chunk sees others."""
    model, tok = dense_model(machine), tokenizer()
    engine = KVBoost(model, tok, store="memory", prefix_bytes=0)
    generator = torch.Generator().manual_seed(0)
    most, count = (60, 6) if machine.smoke else (700, 96)
    lengths = torch.randint(most // 10, most, (count,), generator=generator).tolist()
    chunks = [tuple(torch.randint(10, 900, (n,), generator=generator).tolist()) for n in lengths]
    kernel = engine.adapter.packed
    notes.add(kernel=kernel.name, reason=kernel.reason, chunks=count, tokens=sum(lengths))
    blocks: dict[bool, dict[int, torch.Tensor]] = {}
    for packs in (True, False):
        encoder = engine.encoder(packs=packs)
        batches = group(lengths, 4096, packed=packs)
        encoder.encode([chunks[i] for i in batches[-1]])  # the context, and what is built at first use
        started = time.perf_counter()
        found = [encoder.encode([chunks[i] for i in batch]) for batch in batches]
        seconds = time.perf_counter() - started  # ends with the blocks in host memory
        blocks[packs] = {i: b.kv for batch, done in zip(batches, found, strict=True) for i, b in zip(batch, done)}  # noqa: B905
        notes.add(**{"packed" if packs else "padded": {
            "forwards": len(batches), "seconds": seconds, "tokens_per_s": sum(lengths) / seconds,
        }})  # fmt: skip
    gaps = [float((blocks[True][i] - kv).abs().max() / kv.abs().max()) for i, kv in blocks[False].items()]
    few = sorted(range(count), key=lambda i: lengths[i])[:4]
    encoder = engine.encoder(packs=True)
    before = encoder.encode([chunks[i] for i in few])
    after = encoder.encode([chunks[few[0]][::-1], *(chunks[i] for i in few[1:])])
    alone = all(torch.equal(a.kv, b.kv) for a, b in zip(before[1:], after[1:], strict=True))
    ok = alone and max(gaps) < (1e-3 if machine.smoke else 0.2)
    notes.add(largest_gap=max(gaps), others_unchanged=alone, counts=engine.stats()["encoding"], ok=ok)
