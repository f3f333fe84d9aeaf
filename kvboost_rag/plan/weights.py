"""The bytes of a model's parts: from its config.json alone, or from a built-in shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
AWQ_GROUPS = (32, 64, 128, -1)  # sizes that are read; -1: one group over all inputs
_HALF = 2  # bytes
Linear = tuple[str, int, int, bool]

# Plain (bf16) shapes; "<name>-awq" is the same in 4 bits, groups of 128 (where those fit).
SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": vocab,
    }
    for name, kind, layers, hidden, inner, heads, kv_heads, vocab in (
        ("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 152064),
        ("qwen2.5-14b", "qwen2", 48, 5120, 13824, 40, 8, 152064),
        ("qwen2.5-32b", "qwen2", 64, 5120, 27648, 40, 8, 152064),
        ("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 151936),
        ("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128256),
        ("llama-3.3-70b", "llama", 80, 8192, 28672, 64, 8, 128256),
    )
}  # fmt: skip
SHAPES["smollm2"] = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of each part. ``head`` is the output matrix; where it is tied, it is the embedding and counted once."""

    layers: tuple[int, ...]
    embed: int
    head: int
    rest: int  # final norm and such
    kv_per_token: int
    tied: bool = False
    name: str = ""
    mlp_row: int = 0  # activations of one row inside an MLP
    row: int = 0  # and of one row besides: hidden states, queries, outputs

    @property
    def total(self) -> int:
        """All weights."""
        return sum(self.layers) + self.embed + self.rest + (0 if self.tied else self.head)


def find_weights(name: str | Path) -> Weights:
    """``name``: a folder or config.json, a built-in shape (:data:`SHAPES`, also with ``-awq``), or a hub id.

    Raises:
        ModelNotFoundError, CheckpointError (an unreadable config), UnsupportedModelError (an architecture or
        quantisation whose sizes are not known here).
    """
    path = Path(name).expanduser()
    if path.exists():
        return _from_file(path / "config.json" if path.is_dir() else path)
    shape = str(name).lower()
    base = shape.removesuffix("-awq")
    if base in SHAPES and (base == shape or SHAPES[base]["hidden_size"] % 128 == 0):
        packed = {"quantization_config": {"quant_method": "awq", "group_size": 128}} if base != shape else {}
        return weights_of_config({**SHAPES[base], **packed, "dtype": "bfloat16"}, name=shape)
    if isinstance(name, Path) or str(name).count("/") != 1:
        raise ModelNotFoundError(
            f"no model {str(name)!r}: no such path",
            hint=f"a folder, a hub id (owner/name), or a shape, all but the last also with -awq: {', '.join(SHAPES)}",
        )
    return _from_file(_hub_config(str(name)))


def _hub_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as e:
        raise ModelNotFoundError(
            f"the config of {name!r} could not be fetched: {str(e).splitlines()[0][:200] if str(e) else e!r}",
            hint="check the spelling and the network, or give a local folder",
        ) from e


def _from_file(file: Path) -> Weights:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read as a model's config.json: {e}") from e
    return weights_of_config(config, name=file.parent.name)


def weights_of_config(config: Mapping[str, Any], *, name: str = "") -> Weights:
    """The sizes of a Llama-like decoder. Raises UnsupportedModelError, CheckpointError (a number is missing)."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"sizes of model type {kind!r} are not known here", hint=f"known: {', '.join(FAMILIES)}"
        )
    try:
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        heads, vocab, count = (int(config[k]) for k in ("num_attention_heads", "vocab_size", "num_hidden_layers"))
        kv_heads = int(config.get("num_key_value_heads") or heads)
        dim = int(config.get("head_dim") or hidden // heads)
        if min(hidden, inner, heads, vocab, count, kv_heads, dim) < 1:
            raise ValueError("sizes above zero")
    except (KeyError, TypeError, ValueError, ArithmeticError) as e:
        raise CheckpointError(f"config.json of {name or 'the model'} lacks {e}") from e
    size = _dtype_bytes(config)
    per_value, dense_names = _linear_bytes(config, name, size), not_converted(config.get("quantization_config"))
    linears = _linears(config, hidden, inner, heads * dim, kv_heads * dim)
    norms = (2 * hidden + (2 * dim if kind == "qwen3" else 0)) * size

    def layer_bytes(index: int) -> int:
        total = norms
        for path, inputs, outputs, bias in linears:
            stays = is_listed(f"model.layers.{index}.{path}", dense_names)
            total += round(inputs * outputs * (size if stays else per_value(inputs))) + (outputs * size if bias else 0)
        return total

    return Weights(
        layers=tuple(layer_bytes(i) for i in range(count)),
        embed=vocab * hidden * size,
        head=vocab * hidden * size,
        rest=hidden * size,
        kv_per_token=count * 2 * kv_heads * dim * size,
        tied=bool(config.get("tie_word_embeddings", False)),
        name=name,
        **row_bytes(hidden, inner, heads * dim, size),
    )


def _linears(config: Mapping[str, Any], hidden: int, inner: int, queries: int, keys: int) -> list[Linear]:
    """The linear layers of one decoder layer: path, inputs, outputs, whether there is a bias."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    kind = config.get("model_type")
    if kind == "phi3":
        return [
            ("self_attn.qkv_proj", hidden, queries + 2 * keys, False), ("self_attn.o_proj", queries, hidden, False),
            ("mlp.gate_up_proj", hidden, 2 * inner, False), ("mlp.down_proj", inner, hidden, False),
        ]  # fmt: skip
    qkv = attention or kind == "qwen2"
    return [
        ("self_attn.q_proj", hidden, queries, qkv), ("self_attn.k_proj", hidden, keys, qkv),
        ("self_attn.v_proj", hidden, keys, qkv), ("self_attn.o_proj", queries, hidden, attention),
        ("mlp.gate_proj", hidden, inner, mlp), ("mlp.up_proj", hidden, inner, mlp),
        ("mlp.down_proj", inner, hidden, mlp),
    ]  # fmt: skip


def not_converted(quantization: object) -> tuple[str, ...]:
    """The modules that a ``quantization_config`` leaves dense."""
    listed = quantization.get("modules_to_not_convert") if isinstance(quantization, Mapping) else None
    names = listed if isinstance(listed, list | tuple) else [listed] if isinstance(listed, str) else []
    return tuple(str(name) for name in names)


def is_listed(path: str, modules: Iterable[str]) -> bool:
    """Whether ``modules`` names this module or one that it lies in, by whole path, by parts of it, or by its own name:
    ``model.layers.3.mlp.gate`` by itself, by ``layers.3``, ``mlp`` or ``gate``, and not by ``layers.30``."""
    return any(f".{name}." in f".{path}." for name in modules if name)


def row_bytes(hidden: int, inner: int, queries: int, size: int) -> dict[str, int]:
    """Activations of one row, in bytes, as transformers' layers keep them: gate, up and their product inside the MLP;
    residual, its norm, queries, outputs (also in fp32, while parts are merged) besides."""
    return {"mlp_row": 3 * inner * size, "row": (4 * hidden + 2 * queries) * size + 4 * queries}


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return 4 if dtype == "float32" else _HALF


def _linear_bytes(config: Mapping[str, Any], name: str, dense: int) -> Any:
    """Bytes per weight of a linear layer, given its number of inputs."""
    quantization = config.get("quantization_config") or {}
    if not quantization:
        return lambda inputs: dense
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"config.json of {name or 'the model'} has no readable quantization_config")
    method = quantization.get("quant_method")
    if method != "awq":
        raise UnsupportedModelError(
            f"{name or 'the model'} is quantised with {method}; only AWQ and plain weights are streamed",
            hint="take the AWQ checkpoint, or the one that is not quantised",
        )
    group = quantization.get("group_size", quantization.get("q_group_size", 128))
    bits, layout = quantization.get("bits", quantization.get("w_bit", 4)), quantization.get("version", "gemm")
    if (str(layout).lower(), bits) != ("gemm", 4) or group not in AWQ_GROUPS:
        raise UnsupportedModelError(
            f"{name or 'the model'} is AWQ in the layout {layout!r}, {bits} bits, group size {group}",
            hint=f"read are gemm, 4 bits, {', '.join(map(str, AWQ_GROUPS))}",
        )
    # 4 bits, and per group a 16-bit scale and a 4-bit zero.
    return lambda inputs: 0.5 + 2.5 / (inputs if group == -1 else group)
