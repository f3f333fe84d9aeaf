"""Which kernel multiplies packed weights; Triton's own in its interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost_rag.model.awq import installed, linear
from kvboost_rag.model.awq.linear import matmul, matmul_torch
from tests.awq.rtn import quantize

CPU = torch.device("cpu")


def gemm(x: Any, qweight: Any, scales: Any, qzeros: Any, split: int) -> torch.Tensor:
    """What the extension computes, in its order of arguments."""
    return matmul_torch(x, qweight, qzeros, scales)


def broken(*args: Any) -> torch.Tensor:
    raise RuntimeError("CUDA error: no kernel image is available")


@pytest.fixture(autouse=True)
def _ask_again() -> Any:
    installed.product.cache_clear()
    yield
    installed.product.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, function: Any, package: str = "awq_ext") -> None:
    """As if ``package`` were installed, with this product."""
    module: Any = SimpleNamespace(gemm_forward_cuda=function)
    if package == "gptqmodel.utils.awq":
        module = SimpleNamespace(
            awq_gemm_forward=lambda *args: function(*args[:5]) if args[5] is True else None,
            awq_runtime_available=lambda: True,
        )
        monkeypatch.setitem(sys.modules, "gptqmodel", SimpleNamespace())  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "gptqmodel.utils", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, package, module)


PACKAGES = ["awq_ext", "gptqmodel_awq_kernels", "gptqmodel.utils.awq"]


@pytest.mark.parametrize("package", PACKAGES)
def test_others_kernels_are_used_where_they_are_installed_and_right(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counting(*args: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return gemm(*args)

    install(monkeypatch, counting, package)
    monkeypatch.setattr(linear, "_on_gpu", lambda x: True)
    monkeypatch.setattr(linear, "_kernel", lambda device: None)
    packed = quantize(torch.randn(64, 128), 32)
    x = torch.randn(7, 128).half()
    assert torch.equal(matmul(x, *packed), matmul_torch(x, *packed))
    assert calls == [5, 7], "asked once whether it is right, then used"
    matmul(x.float(), *packed)
    matmul(x.bfloat16(), *packed)
    matmul(torch.randn(2000, 128).half(), *packed)
    matmul(x, *quantize(torch.randn(40, 128), 32))
    assert calls == [5, 7], "not for other types, many rows, or columns that it has no tiles for"


def test_the_next_one_serves_where_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, lambda *a: gemm(*a) + 1, "gptqmodel.utils.awq")
    install(monkeypatch, broken, "awq_ext")
    install(monkeypatch, gemm, "gptqmodel_awq_kernels")
    found = installed.product(CPU)
    assert found is not None
    packed = quantize(torch.randn(64, 128), 32)
    x = torch.randn(3, 128).half()
    assert torch.equal(found(x, packed[0], packed[1], packed[2]), matmul_torch(x, *packed))
    assert "gptqmodel is installed but not used: its result is wrong" in caplog.text
    assert "autoawq-kernels is installed but not used: RuntimeError" in caplog.text


def test_a_gptqmodel_that_cannot_compile_or_import_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    install(monkeypatch, gemm, "gptqmodel.utils.awq")
    module = sys.modules["gptqmodel.utils.awq"]
    monkeypatch.setattr(module, "awq_runtime_available", lambda: False)
    monkeypatch.setattr(module, "awq_runtime_error", lambda: "no nvcc", raising=False)
    assert installed.product(CPU) is None
    assert "no nvcc" in caplog.text
    installed.product.cache_clear()

    def explode() -> bool:
        raise OSError("ninja died")

    monkeypatch.setattr(module, "awq_runtime_available", explode)
    assert installed.product(CPU) is None
    assert "OSError: ninja died" in caplog.text


@pytest.mark.parametrize(
    ("function", "reason"), [(broken, "no kernel image"), (lambda *a: gemm(*a) + 1, "its result is wrong")]
)
def test_nothing_is_trusted_untried(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, function)
    assert installed.product(CPU) is None
    assert reason in caplog.text


def test_none_is_needed() -> None:
    found = [name for name in ("awq_ext", "gptqmodel", "gptqmodel_awq_kernels") if importlib.util.find_spec(name)]
    assert found or installed.product(CPU) is None


def test_triton_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken)
    monkeypatch.setattr(linear, "_on_gpu", lambda x: True)
    monkeypatch.setattr(linear, "_kernel", lambda device: SimpleNamespace(matmul=lambda *a: "triton"))
    assert matmul(torch.randn(3, 128).half(), *quantize(torch.randn(64, 128), 32)) == "triton"


@pytest.mark.parametrize(
    ("fused", "dequantized", "used"),
    [
        (matmul_torch, matmul_torch, True),
        (broken, matmul_torch, False),
        (matmul_torch, lambda *a: matmul_torch(*a) * 1.1, False),
    ],
)
def test_triton_is_tried_before_it_is_trusted(
    fused: Any, dequantized: Any, used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(fused=fused, dequantized=dequantized)
    monkeypatch.setitem(sys.modules, "kvboost_rag.model.awq.kernel", module)  # type: ignore[arg-type]
    monkeypatch.setattr("kvboost_rag.model.awq.kernel", module, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    linear._kernel.cache_clear()
    assert (linear._kernel(CPU) is module) == used
    assert ("not used on cpu" in caplog.text) != used
    linear._kernel.cache_clear()


INTERPRETED = """
import torch
from kvboost_rag.model.awq import kernel
from kvboost_rag.model.awq.linear import matmul_torch
from tests.awq.rtn import quantize
torch.manual_seed(0)
for group in (32, 128, -1):
    packed = quantize(torch.randn(136, 256), group)
    for rows in (1, 17, 64, 65):
        x = torch.randn(rows, 256)
        exact = matmul_torch(x, *packed)
        gap = (kernel.matmul(x, *packed) - exact).abs().max() / exact.abs().max()
        assert gap < 1e-5, (group, rows, gap)
        half = kernel.matmul(x.half(), *packed).float()
        assert (half - exact).abs().max() < 5e-3 * exact.abs().max(), (group, rows)
print("as the torch path")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_in_the_interpreter() -> None:
    """The interpreter is switched on before triton is imported: a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    if "only 0-dimensional arrays" in run.stderr:
        pytest.skip("this triton's interpreter is older than this numpy")
    assert "as the torch path" in run.stdout, run.stderr[-2000:]


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvboost_rag.model.awq import kernel

NUMBERS = {"rows", "inputs", "columns", "words", "group", "span", "first", "width"}

def build(function, half, outs, capability, **tiles):
    types = {"x": f"*{half}", "qw": "*i32", "qz": "*i32", "sc": "*fp16", "out": outs}
    constants = {"SHIFT_WORD": kernel.SHIFT_WORD, **tiles}
    signature = {
        name: "constexpr" if name in constants else "i32" if name in NUMBERS else types[name]
        for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"] and made.metadata.shared <= 96 << 10, (capability, made.metadata.shared)

for capability in (75, 80, 89, 90, 120):
    for half in ("fp16", "bf16")[: 1 if capability < 80 else 2]:
        build(kernel._fused, half, "*fp32", capability, BM=16, BN=64, BK=64)
        build(kernel._dequantize, half, f"*{half}", capability, BN=64, BK=32)
print("compiled")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_compile_for_gpus_from_turing_to_blackwell(tmp_path: Path) -> None:
    """No GPU is needed for that: the assembler comes with triton. Shared memory must fit a gaming card's."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    if "ImportError" in run.stderr or "ModuleNotFoundError" in run.stderr:
        pytest.skip("this triton's compiler is called in another way")
    assert "compiled" in run.stdout, run.stderr[-2000:]
