"""What ``gpu_check.py`` measures on: the device with its shapes, and checkpoints of random weights that need no file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from kvboost_rag.model.direct.files import CheckpointFiles, TensorRef
from kvboost_rag.plan import SHAPES

GIB = 1 << 30
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
TOY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 64,
}  # fmt: skip


class Machine:
    """The device under test: CUDA, or the stand-in with toy shapes."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else torch.float16

    def config(self, shape: str, awq: bool = False) -> Qwen2Config:
        values = dict(TOY if self.smoke else SHAPES[shape])
        values.pop("model_type", None)
        config = Qwen2Config(**values, max_position_embeddings=65536, tie_word_embeddings=False)
        if awq:
            config.quantization_config = dict(AWQ)
        return config

    def sync(self) -> None:
        if not self.smoke:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeat: int = 5) -> float:
        """Median time of a call, with the device idle before and after."""
        call()
        times = []
        for _ in range(repeat):
            self.sync()
            started = time.perf_counter()
            call()
            self.sync()
            times.append(time.perf_counter() - started)
        return sorted(times)[repeat // 2]


class RandomFiles(CheckpointFiles):
    """A checkpoint of random weights in the shapes of ``config``; no file is written or read."""

    def __init__(self, config: Qwen2Config) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = Path(tempfile.mkdtemp(prefix="kvboost-random-"))
        self.refs = {}
        plain = Qwen2Config(**{k: v for k, v in config.to_dict().items() if k != "quantization_config"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plain)
        packed = getattr(config, "quantization_config", None)
        for name, p in model.named_parameters():
            if packed and name.endswith("proj.weight"):
                outputs, inputs = p.shape
                groups, stem = inputs // AWQ["group_size"], name.removesuffix("weight")
                self._add(f"{stem}qweight", torch.int32, (inputs, outputs // 8))
                self._add(f"{stem}qzeros", torch.int32, (groups, outputs // 8))
                self._add(f"{stem}scales", torch.float16, (groups, outputs))
            else:
                self._add(name, torch.float16, tuple(p.shape))
        self._noise = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8)

    def _add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.refs[name] = TensorRef(self.folder, dtype, shape, 0, torch.Size(shape).numel() * dtype.itemsize)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        flat = target.detach().view(-1)
        if target.dtype == torch.int32:
            raw = flat.view(torch.uint8)
            for a in range(0, raw.numel(), self._noise.numel()):
                raw[a : a + self._noise.numel()].copy_(self._noise[: raw.numel() - a])
        elif name.endswith("scales"):
            flat.fill_(0.002)
        elif "norm" in name:
            flat.fill_(1.0)
        elif target.is_cuda:
            flat.normal_(0, 0.02)
        else:
            noise = torch.randn(1 << 20, dtype=torch.float32).mul_(0.02).to(flat.dtype)
            for a in range(0, flat.numel(), noise.numel()):
                flat[a : a + noise.numel()].copy_(noise[: flat.numel() - a])


# --- parts --------------------------------------------------------------------------------------------------


class TokenClock:
    """A logits processor that notes when each token's logits are there, and never lets the answer end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        float(scores[0, 0])  # the device has come this far
        self.times.append(time.perf_counter())
        forced = torch.full_like(scores, float("-inf"))
        forced[:, 100] = 0.0
        return forced


def tokenizer() -> Any:
    """The tests' small tokenizer: random weights read any ids."""
    from tests.tiny_tokenizers import tiny_tokenizer

    return tiny_tokenizer()
