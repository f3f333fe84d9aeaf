"""The fingerprint of a loaded model: read off what is in memory, not off a name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from kvboost_rag.errors import TokenizerError
from kvboost_rag.fingerprint import Fingerprint, canonical_json
from kvboost_rag.model.support import rope_parameters

SAMPLES = 64  # values read per parameter
_SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "partial_rotary_factor",
)


def fingerprint_model(model: Any, tokenizer: Any) -> Fingerprint:
    """Compute the identity of ``model`` as loaded (a few hundredths of a second for a small model)."""
    config = model.config
    return Fingerprint(
        architecture=canonical_json({f: getattr(config, f, None) for f in _SHAPE_FIELDS}),
        weights=weights_digest(model),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=_quantization(config),
        rope=canonical_json(rope_parameters(config)),
        adapter=adapter_state(model),
        tokenizer=tokenizer_digest(tokenizer),
    )


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over a strided sample of every parameter and saved buffer (quantised layers keep their weights in
    buffers), by name order."""
    h = hashlib.sha256()
    for name, parameter in sorted(_weights(model).items()):
        h.update(f"{name}:{tuple(parameter.shape)}".encode())
        if parameter.device.type == "meta":  # offloaded by accelerate: shape and name only
            continue
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        h.update(flat[::step][:SAMPLES].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight by name. Layers that are streamed are read where they stay, in host memory."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    found.update(getattr(model, "kvboost_host_weights", {}))
    return found


def _quantization(config: Any) -> str:
    value = getattr(config, "quantization_config", None)
    if value is None:
        return ""
    plain = value.to_dict() if hasattr(value, "to_dict") else value
    return canonical_json(plain)


def adapter_state(model: Any) -> str:
    """Names of the active adapters, or "". Cheap: read before every request, since users switch adapters.

    Adapter weights are parameters and take part in ``weights``.
    """
    if not getattr(model, "peft_config", None) and not getattr(model, "_hf_peft_config_loaded", False):
        return ""
    active = getattr(model, "active_adapters", None)
    names = active() if callable(active) else active
    disabled = any(getattr(m, "_disable_adapters", False) for m in model.modules())
    return canonical_json({"active": names, "disabled": disabled})


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of the fast tokenizer's full state, without its padding and truncation settings.

    Raises:
        TokenizerError: the tokenizer has no fast backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no fast backend",
            hint="load it with AutoTokenizer.from_pretrained(..., use_fast=True)",
        )
    state = json.loads(backend.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    return hashlib.sha256(canonical_json(state).encode()).hexdigest()
