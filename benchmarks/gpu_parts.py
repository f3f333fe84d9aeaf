"""Parts of ``gpu_check.py`` without a model: the tests, the packed product, attention as an operation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from gpu_machine import Machine, Notes
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvboost_rag.errors import KVBoostError
from kvboost_rag.model.awq.linear import matmul, matmul_torch
from kvboost_rag.model.kernels import choose_kernel

ROOT = Path(__file__).resolve().parents[1]


def environment(machine: Machine, notes: Notes) -> None:
    """Versions and the device; in a process of its own, so that what watches over the parts takes no memory there."""
    notes.add(**common.environment())
    if not machine.smoke:
        found = torch.cuda.get_device_properties(0)
        notes.add(capability=f"{found.major}.{found.minor}", memory_bytes=found.total_memory, cuda=torch.version.cuda)


def gpu_tests() -> list[str]:
    """The files that hold tests for a device. By name: others may not even be importable where only torch and
    transformers are."""
    return sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("tests/**/test_gpu.py"))


def tests(machine: Machine, notes: Notes) -> None:
    """Every test that is marked ``gpu``; each outcome is noted as it comes."""
    flags = ["--collect-only"] if machine.smoke else ["--durations=15"]
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", "-m", "gpu", *flags]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *gpu_tests()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line.rstrip())
            if " PASSED" in line or " FAILED" in line or " ERROR" in line or " SKIPPED" in line:
                count = {w: sum(f" {w.upper()}" in entry for entry in lines) for w in ("passed", "failed", "skipped")}
                notes.add(**count, last=line.strip()[:200])
    notes.add(ok=run.returncode == 0, tail="\n".join(lines)[-6000:])


def kernels(machine: Machine, notes: Notes) -> None:
    """The packed product: error against fp32, and time, from one row to a prefill's; cuBLAS over dense weights and what
    the memory's speed allows beside it."""
    from kvboost_rag.model.awq import linear

    notes.add(triton=machine.device.type == "cuda" and linear._kernel(machine.device) is not None)
    for inputs, outputs in ((256, 512), (512, 256)) if machine.smoke else ((5120, 27648), (27648, 5120)):
        rows = notes.try_to(f"{inputs}x{outputs}", lambda i=inputs, o=outputs: _products(machine, i, o))
        if isinstance(rows, list):
            notes.add(ok=notes.values.get("ok", True) and all(r["relative_error"] < 2e-2 for r in rows))


def _products(machine: Machine, inputs: int, outputs: int) -> list[dict[str, Any]]:
    device = machine.device
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs, outputs // 8), dtype=torch.int32, device=device)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (inputs // 128, outputs // 8), dtype=torch.int32, device=device)
    scales = torch.rand(inputs // 128, outputs, device=device).mul_(0.01).half()
    dense = torch.randn(inputs, outputs, device=device, dtype=machine.dtype)
    nbytes = sum(t.numel() * t.element_size() for t in (qweight, qzeros, scales))
    found = []
    for rows in (1, 4, 16, 64, 65, 256, 1024):
        x = torch.randn(rows, inputs, device=device, dtype=machine.dtype)
        exact = matmul_torch(x.float(), qweight, qzeros, scales)
        error = (matmul(x, qweight, qzeros, scales).float() - exact).abs().max() / exact.abs().max()
        seconds = machine.seconds(lambda x=x: matmul(x, qweight, qzeros, scales))
        found.append({
            "rows": rows, "relative_error": float(error), "seconds": seconds,
            "torch_seconds": machine.seconds(lambda x=x: matmul_torch(x, qweight, qzeros, scales), 3),
            "dense_cublas_seconds": machine.seconds(lambda x=x: x @ dense),
            "packed_gb_per_s": nbytes / seconds / 1e9,
        })  # fmt: skip
    return found


def attention_operation(machine: Machine) -> list[dict[str, Any]]:
    """Causal attention by itself: eager, torch's SDPA with each of its kernels, and the kernels that ``attn=`` knows."""
    rows = []
    for n in (256,) if machine.smoke else (2048, 8192, 16384):
        q = torch.randn(1, n, 8, 128, device=machine.device, dtype=machine.dtype).transpose(1, 2)
        k, v = (torch.randn(1, n, 2, 128, device=machine.device, dtype=machine.dtype).transpose(1, 2) for _ in range(2))
        row: dict[str, Any] = {"tokens": n, "heads": 8, "key_heads": 2}
        for name, call in _attention_calls(machine, q, k, v).items():
            try:
                row[name] = {"seconds": machine.seconds(call), "peak_bytes": machine.peak(call)}
            except (RuntimeError, KVBoostError) as e:  # not there for this device: that is a finding, not a failure
                row[name] = {"not_there": str(e)[:200]}
        rows.append(row)
    return rows


def _attention_calls(machine: Machine, q: Any, k: Any, v: Any) -> dict[str, Any]:
    n = q.shape[2]

    def eager() -> Any:
        keys, values = (x.repeat_interleave(4, dim=1) for x in (k, v))
        scores = (q @ keys.transpose(-1, -2)) * 128**-0.5
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values

    def sdpa(kernel: Any) -> Any:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def chosen(name: str) -> Any:
        kernel = choose_kernel(name, machine.device, machine.dtype, (8, 2), 128)
        return lambda: kernel.causal(q, k, v, 128**-0.5)

    calls: dict[str, Any] = {"eager": eager, "sdpa_flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION)}
    for name in ("auto",) if machine.smoke else ("auto", "flash-attn", "varlen"):
        try:
            calls[name] = chosen(name)
        except KVBoostError as e:
            message = str(e)

            def absent(message: str = message) -> Any:
                raise RuntimeError(message)

            calls[name] = absent
    if not machine.smoke:
        calls["sdpa_efficient"] = lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION)
        calls["sdpa_cudnn"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
    return calls
