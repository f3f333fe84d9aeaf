"""What ``gpu_check.py`` measures on and writes to: the device with its shapes and clock, notes that are on disk as soon as
they are taken, and checkpoints of random weights that need no file."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import pool_of_chunks
from transformers import Qwen2Config

from kvboost_rag.model.direct.files import CheckpointFiles, TensorRef
from kvboost_rag.model.direct.resident import load_resident
from kvboost_rag.plan import SHAPES

GIB = 1 << 30
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
TOY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 64,
}  # fmt: skip


class Notes:
    """What a part found; written anew at each note, so that a part that is killed has told what it knew."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.values: dict[str, Any] = {}

    def add(self, **values: Any) -> None:
        self.values.update(values)
        if self.file is not None:
            fresh = self.file.with_suffix(".new")
            fresh.write_text(json.dumps(self.values, default=str))
            os.replace(fresh, self.file)

    def try_to(self, name: str, call: Callable[[], Any]) -> Any:
        """Note what ``call`` returns, or its error: one figure that fails must not cost the others."""
        try:
            found = call()
        except Exception as e:
            found = {"error": f"{type(e).__name__}: {str(e)[:500]}"}
        self.add(**{name: found})
        return found


class Machine:
    """The device under test: CUDA, or the CPU with toy shapes."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else torch.float16
        self._flush: torch.Tensor | None = None

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

    def seconds(self, call: Callable[[], Any], repeat: int = 10) -> float:
        """Median time of a call on the device, its caches cold; by events, so that the way there does not count."""
        call()
        if self.smoke:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        if self._flush is None:
            self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
        for start, end in events:
            self._flush.zero_()  # the GPU is busy while the call is enqueued
            start.record()
            call()
            end.record()
        self.sync()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3

    def peak(self, call: Callable[[], Any]) -> int | None:
        """Bytes that a call takes on the device at its peak, beyond what was there."""
        if self.smoke:
            call()
            return None
        self.sync()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.sync()
        return int(torch.cuda.max_memory_allocated() - before)


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


def dense_model(machine: Machine, shape: str = "qwen2.5-7b") -> Any:
    """Random weights on the device."""
    config = machine.config(shape)
    files = RandomFiles(config)
    dtype = machine.dtype if machine.smoke else torch.bfloat16
    return load_resident(files.folder, config, dtype=dtype, device=machine.device, files=files)


def chunk_pool(chunks: int, tokens: int) -> list[str]:
    """Texts of exactly so many tokens each."""
    tok = tokenizer()
    return pool_of_chunks(
        lambda t: tok(t, add_special_tokens=False).input_ids, lambda i: tok.decode(i, skip_special_tokens=False),
        chunks, tokens,
    )  # fmt: skip
