"""Tiny AWQ checkpoints in the ``gemm`` layout: a random model, rounded to nearest in groups, and its dense oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from kvboost_rag.model.awq.pack import dequantize, pack
from tests.tiny import tiny_model, tiny_tokenizer

# Every dimension divides by 128, the largest group.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def quantize(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round ``weight [N, K]`` to nearest: ``qweight``, ``qzeros``, ``scales`` (fp16)."""
    w = weight.detach().float().T
    inputs, outputs = w.shape
    grouped = w.reshape(-1, inputs if group_size == -1 else group_size, outputs)
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low).clamp(min=1e-4) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).reshape(inputs, outputs)
    return pack(values), pack(zeros), scales


def save_awq(
    path: Path,
    family: str = "llama",
    *,
    group_size: int = 32,
    not_converted: tuple[str, ...] = (),
    shards: int = 1,
    dtype: torch.dtype = torch.float16,
    **overrides: Any,
) -> PreTrainedModel:
    """Write the checkpoint folder and return the dense fp32 model with the dequantised weights."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer), **{**SHAPE, **overrides})
    for parameter in model.parameters():  # not model.to(): that would round the rotary tables as well
        parameter.copy_(parameter.to(dtype))
    tensors = {name: p.detach().to(dtype).contiguous() for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and name.split(".")[-1] not in not_converted:
            words, zeros, scales = quantize(module.weight, group_size)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.qweight": words, f"{name}.qzeros": zeros, f"{name}.scales": scales}
            module.weight.copy_(dequantize(words, zeros, scales, torch.float32).T)
    path.mkdir(parents=True, exist_ok=True)
    _write(path, tensors, shards)
    tokenizer.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    config = model.config.to_dict() | {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [type(model).__name__],
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": list(not_converted) or None,
        },
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return model


def _write(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of a one-file checkpoint; ``__`` in a name stands for a dot."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_quantization(path: Path, **changes: Any) -> None:
    """Change fields of config.json's quantization_config."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
