"""Everything that needs a CUDA device, in one call under nine minutes: tests, kernels, streaming, time to first token.

    make gpu-check                                        (or, without .venv: PYTHONPATH=. python benchmarks/gpu_check.py)
    PYTHONPATH=. python benchmarks/gpu_check.py --smoke   the same code over toy shapes on the CPU's stand-in device

Nothing is downloaded: models are random weights in real shapes. The full run has not been made yet (no GPU so far).
Writes ``results/gpu_check.json``. A part that fails is an entry with its error; parts that would not fit into the time
are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import environment, pool_of_chunks, spread, write_result
from gpu_machine import GIB, Machine, RandomFiles, TokenClock, tokenizer

from kvboost_rag import KVBoost
from kvboost_rag.model.awq.linear import matmul, matmul_torch
from kvboost_rag.model.direct.resident import load_resident
from kvboost_rag.model.streaming.load import choose_backend, load_streamed, resolve_budget
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import Budget, KVBudget

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 540


def tests(machine: Machine) -> dict[str, Any]:
    """Every test that is marked ``gpu``."""
    if machine.smoke:
        return {"skipped": "smoke"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    return {"ok": run.returncode == 0, "tail": run.stdout[-3000:]}


def kernels(machine: Machine) -> dict[str, Any]:
    """The packed product: error against fp32, and time, from one row to a prefill's."""
    inputs, outputs = (256, 512) if machine.smoke else (5120, 27648)
    device = machine.device
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs, outputs // 8), dtype=torch.int32, device=device)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (inputs // 128, outputs // 8), dtype=torch.int32, device=device)
    scales = torch.rand(inputs // 128, outputs, device=device).mul_(0.01).half()
    nbytes = sum(t.numel() * t.element_size() for t in (qweight, qzeros, scales))
    rows_out = []
    for rows in (1, 4, 16, 64, 256, 1024):
        x = torch.randn(rows, inputs, device=device, dtype=machine.dtype)
        exact = matmul_torch(x.float(), qweight, qzeros, scales)
        error = (matmul(x, qweight, qzeros, scales).float() - exact).abs().max() / exact.abs().max()
        seconds = machine.seconds(lambda x=x: matmul(x, qweight, qzeros, scales))
        plain = machine.seconds(lambda x=x: matmul_torch(x, qweight, qzeros, scales), 3)
        rows_out.append({
            "rows": rows, "relative_error": float(error), "seconds": seconds, "torch_seconds": plain,
            "packed_gb_per_s": nbytes / seconds / 1e9,
        })  # fmt: skip
    return {"shape": [inputs, outputs], "rows": rows_out}


def streaming(machine: Machine) -> dict[str, Any]:
    """A 32B-shaped AWQ model under an enforced cap: tokens/s against the bound that the measured bus gives, and time
    to first token with and without chunk reuse."""
    config = machine.config("qwen2.5-32b", awq=True)
    if machine.smoke:
        backend: Any = VirtualBackend()
        budget = Budget(vram=4 << 20, context=256, reserve=0, workspace=0, held_tokens=64)
    else:
        backend = choose_backend(machine.device, None)
        # A prefill of 2,000 tokens in one forward needs more room for activations than decoding does.
        budget = resolve_budget(Budget(vram=8 * GIB, held_tokens=664, workspace=GIB), backend)
        torch.cuda.set_per_process_memory_fraction(
            (8 * GIB - budget.reserve) / torch.cuda.get_device_properties(0).total_memory
        )
    started = time.perf_counter()
    files = RandomFiles(config)
    model = load_streamed(files.folder, config, dtype=machine.dtype, budget=budget, backend=backend, files=files)
    loaded = time.perf_counter() - started
    streamer = model.kvboost_streamer
    source = streamer.slab.blocks[0][: model.kvboost_plan.slot_bytes]
    probe_s = backend.measure(torch.empty_like(source, device=machine.device), source)
    result = _decode(machine, model)
    rate = source.numel() / probe_s if probe_s else None
    bound = model.kvboost_plan.tokens_per_s(rate) if rate else None
    sizes = {"chunks": 2, "tokens": 32} if machine.smoke else {"chunks": 8, "tokens": 256}
    result |= {
        "load_s": loaded, "plan": model.kvboost_plan.as_dict(), "probe_gb_per_s": rate / 1e9 if rate else None,
        "bound_tokens_per_s": bound, "share_of_bound": result["tokens_per_s"] / bound if bound else None,
        "ttft": _guarded(lambda: _ttft(machine, model, **sizes, queries=2)),
        "streamer": streamer.stats.as_dict(),
    }  # fmt: skip
    if not machine.smoke:
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return result


def _guarded(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``call`` returns, or its error: one figure that fails must not cost the others."""
    try:
        return call()
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def _decode(machine: Machine, model: Any, steps: int = 12) -> dict[str, Any]:
    engine = KVBoost(model, tokenizer(), store=None, reuse="off", prefix_bytes=0)
    clock = TokenClock()
    options: dict[str, Any] = {"max_new_tokens": steps + 3, "logits_processors": [clock]}
    stream = engine.stream("The river passes under seven bridges.", **options)
    for _ in stream:
        pass
    steady = [b - a for a, b in itertools.pairwise(clock.times[2:])]
    return {"tokens_per_s": 1 / spread(steady)["median"], "seconds_per_token": spread(steady)}


def _ttft(machine: Machine, model: Any, *, chunks: int, tokens: int, queries: int) -> dict[str, Any]:
    """Time to first token over ``chunks`` warm chunks in changing order, against a full prefill and against the floor
    (the whole context already in place: only the question is forwarded)."""
    tok = tokenizer()
    engine = KVBoost(model, tok, store="memory", prefix_bytes=0)
    floor = KVBoost(model, tok, store=None, reuse="prefix", prefix_bytes=1 << 36)
    pool = pool_of_chunks(
        lambda t: tok(t, add_special_tokens=False).input_ids, lambda i: tok.decode(i, skip_special_tokens=False),
        chunks, tokens,
    )  # fmt: skip
    engine.warm(pool)
    rows: dict[str, list[float]] = {}
    forwarded: dict[str, float] = {}
    for query in range(queries):
        context = "\n\n".join(pool[query:] + pool[:query])
        prompt = f"{context}\n\nQuestion {query}: which river?"
        floor.generate(f"{context}\n\nSomething else.", max_new_tokens=1)
        for name, run in {
            "full": lambda p=prompt: engine.generate(p, max_new_tokens=1, reuse="off"),
            "fast": lambda p=prompt: engine.generate(p, max_new_tokens=1, repair="fast"),
            "balanced": lambda p=prompt: engine.generate(p, max_new_tokens=1),
            "floor": lambda p=prompt: floor.generate(p, max_new_tokens=1),
        }.items():
            report = run().report
            rows.setdefault(name, []).append(report.ttft_s)
            forwarded[name] = report.forwarded_tokens
        floor.forget()
    times = {name: spread(values) for name, values in rows.items()}
    return {"context_tokens": chunks * tokens, "ttft_s": times, "forwarded_tokens": forwarded}


def reuse(machine: Machine) -> dict[str, Any]:
    """Time to first token on 7B-shaped resident weights, 4k to 32k tokens."""
    config = machine.config("qwen2.5-7b")
    files = RandomFiles(config)
    dtype = machine.dtype if machine.smoke else torch.bfloat16
    model = load_resident(files.folder, config, dtype=dtype, device=machine.device, files=files)
    sizes = ((2, 32),) if machine.smoke else ((8, 512), (16, 512), (32, 512), (64, 512))
    rows = [_guarded(lambda c=c, n=n: _ttft(machine, model, chunks=c, tokens=n, queries=3)) for c, n in sizes]
    return {"rows": rows, "paged": _guarded(lambda: _paged(machine, model))}


def _paged(machine: Machine, model: Any) -> dict[str, Any]:
    """KV of four times its budget against one buffer, over warm chunks: the difference in logits, and time per token."""
    tok = tokenizer()
    chunks, tokens = (4, 64) if machine.smoke else (16, 512)
    pool = pool_of_chunks(
        lambda t: tok(t, add_special_tokens=False).input_ids, lambda i: tok.decode(i, skip_special_tokens=False),
        chunks, tokens,
    )  # fmt: skip
    prompt = "\n\n".join(pool) + "\n\nQuestion: which river?"
    whole = KVBoost(model, tok, store="memory", prefix_bytes=0)
    per_token = whole.adapter.spec.bytes_per_token
    page = 8 if machine.smoke else 64
    budget = KVBudget(chunks * tokens * per_token // 4, page_tokens=page)
    paged = KVBoost(model, tok, store="memory", prefix_bytes=0, kv_vram=budget)
    result: dict[str, Any] = {"context_tokens": chunks * tokens, "kv_vram": budget.nbytes}
    logits = {}
    for name, engine in (("whole", whole), ("paged", paged)):
        engine.warm(pool)
        engine.engine.eos_ids = frozenset()
        engine.generate(prompt, max_new_tokens=2)
        machine.sync()
        report = engine.generate(prompt, max_new_tokens=32).report
        logits[name] = engine.score(prompt, list(range(40, 60)), logits=True).logits
        result[name] = {
            "ttft_s": report.ttft_s, "seconds_per_token": (report.total_s - report.ttft_s) / 31,
            "host_tokens": report.host_tokens, "spilled_pages": report.spilled_pages,
        }  # fmt: skip
    gap = (logits["paged"] - logits["whole"]).abs().max() / logits["whole"].abs().max()
    return result | {"relative_logit_error": float(gap), "stats": paged.stats()["paged"]}


def attention(machine: Machine) -> dict[str, Any]:
    """Causal attention as an operation by itself: eager, and torch's SDPA with each of its kernels."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = []
    for n in (256,) if machine.smoke else (2048, 8192, 16384):
        q, k, v = (torch.randn(1, 8, n, 128, device=machine.device, dtype=machine.dtype) for _ in range(3))

        def eager(q: Any = q, k: Any = k, v: Any = v, n: int = n) -> Any:
            scores = (q @ k.transpose(-1, -2)) * 128**-0.5
            hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
            return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

        def sdpa(kernel: Any, q: Any = q, k: Any = k, v: Any = v) -> Any:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        calls = {"eager": eager, "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION)}
        if not machine.smoke:
            calls["efficient"] = lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION)
        row: dict[str, Any] = {"tokens": n, "heads": 8}
        for name, call in calls.items():
            row[name] = {"seconds": machine.seconds(call), "peak_bytes": _peak(machine, call)}
        rows.append(row)
    return {"rows": rows}


def _peak(machine: Machine, call: Callable[[], Any]) -> int | None:
    if machine.smoke:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


# (part, seconds it may need)
PARTS: tuple[tuple[Callable[[Machine], dict[str, Any]], int], ...] = (
    (tests, 150), (kernels, 40), (streaming, 180), (reuse, 150), (attention, 20),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="toy shapes on the CPU; no figure means anything")
    parser.add_argument("--only", nargs="*", help="names of parts")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing to check (--smoke runs the script itself over toy shapes)", file=sys.stderr)
        return 0
    machine, started = Machine(args.smoke), time.perf_counter()
    result: dict[str, Any] = {"environment": environment(), "smoke": args.smoke}
    for part, needs in PARTS:
        name = part.__name__
        if args.only and name not in args.only:
            continue
        begun = time.perf_counter()
        if begun - started + needs > LIMIT_S and name != "attention":
            result[name] = {"left_out": f"{LIMIT_S - (begun - started):.0f} s were left, it may need {needs}"}
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            result[name] = part(machine)
        except Exception as e:
            result[name] = {"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()[-2000:]}
        result[name]["seconds_taken"] = time.perf_counter() - begun
        gc.collect()
        if not args.smoke:
            torch.cuda.empty_cache()
        if not args.smoke:
            write_result("gpu_check", result)
    failed = [k for k, v in result.items() if isinstance(v, dict) and ("error" in v or v.get("ok") is False)]
    print("nothing written (smoke)" if args.smoke else "written to benchmarks/results/gpu_check.json")
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
