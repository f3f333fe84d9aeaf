"""Tiny random models of every architecture that is supported or refused, built in process.

``tiny_model("qwen3")`` is four layers of width 64 over the vocabulary of ``tiny_tokenizer()``, window 4096. Weights are
drawn much wider than a training run would start with, so that every token of the context moves the logits: a wrong key
anywhere is seen in the output.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_tokenizers import sentencepiece_like_tokenizer, tiny_tokenizer

__all__ = ["FAMILIES", "REFUSED", "save_tiny", "sentencepiece_like_tokenizer", "tiny_model", "tiny_tokenizer"]

HIDDEN, LAYERS, HEADS, KV_HEADS, WINDOW = 64, 4, 4, 2, 4096
INIT_STD = 0.2

Spec = tuple[str, dict[str, Any]]  # (stem of the config class, what differs from _BASE)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


_LONGROPE = {
    "original_max_position_embeddings": 512,
    **_rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, partial_rotary_factor=0.5),
}

FAMILIES: dict[str, Spec] = {
    "llama": ("Llama", {}),
    "llama3-scaling": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512),
    ),
    "linear": ("Llama", _rope("linear", factor=4.0)),
    "yarn": ("Llama", _rope("yarn", factor=8.0, original_max_position_embeddings=512)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", _rope("default", partial_rotary_factor=0.5)),
    "mha": ("Llama", {"num_key_value_heads": HEADS}),
    "gqa": ("Llama", {"num_key_value_heads": 2}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
}

REFUSED: dict[str, Spec] = {
    "mistral-sliding": ("Mistral", {"sliding_window": 64}),
    "gemma2": ("Gemma2", {"sliding_window": 64}),
    "gemma3": ("Gemma3Text", {"sliding_window": 64}),
    "longrope": ("Phi3", _LONGROPE),
    "dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 3, "head_dim": 8,
        },
    ),
    "falcon": ("Falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": True}),
    "bloom": ("Bloom", {"n_layer": LAYERS, "n_head": HEADS}),
    "mamba": ("Mamba", {"state_size": 8}),
    "t5": ("T5", {"d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": LAYERS, "num_heads": HEADS}),
}  # fmt: skip

_MODEL_CLASS = {"T5": "T5ForConditionalGeneration", "Gemma3Text": "Gemma3ForCausalLM"}
_LLAMA_LIKE = {"Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3Text", "DeepseekV3"}


@lru_cache(maxsize=1)
def _token_ids() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [tokenizer.eos_token_id, end_of_turn],
        "pad_token_id": tokenizer.pad_token_id,
    }


def _config_values(stem: str) -> dict[str, Any]:
    values = dict(_token_ids())
    eos_ids = values["eos_token_id"]
    values["eos_token_id"] = eos_ids[0]
    values["hidden_size"] = HIDDEN
    if stem in _LLAMA_LIKE:
        values |= {
            "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS, "max_position_embeddings": WINDOW,
        }  # fmt: skip
    elif stem in ("Falcon", "Mamba"):
        values |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return values


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of ``family``; ``overrides`` are config fields."""
    stem, differs = {**FAMILIES, **REFUSED}[family]
    values = {"tie_word_embeddings": False, **_config_values(stem), **differs, **overrides}
    return getattr(transformers, f"{stem}Config")(**values)


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A random model of ``family`` in eval mode; the same seed gives the same weights in every process.

    For another tokenizer pass ``vocab_size=len(tokenizer)``.
    """
    stem = {**FAMILIES, **REFUSED}[family][0]
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _MODEL_CLASS.get(stem, f"{stem}ForCausalLM"))(config)
        _randomise(model)
    model.generation_config = GenerationConfig(
        **{k: v for k, v in _token_ids().items() if k != "vocab_size"}, do_sample=False
    )
    model.requires_grad_(False)
    return model.to(dtype).eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Wide weights; biases and norms too, so that a lost bias or a skipped q/k norm cannot hide."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, INIT_STD)
        elif "norm" in name and name.endswith("weight"):
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.normal_(0.0, INIT_STD)


def save_tiny(
    path: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint folder (safetensors, config, generation config, tokenizer) that ``load_model`` reads."""
    tokenizer = tokenizer or tiny_tokenizer()
    overrides.setdefault("vocab_size", len(tokenizer))
    tiny_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)
