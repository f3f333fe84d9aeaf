"""Which models chunk reuse is proved for, and why others are refused.

Reuse at another position needs: full causal attention in every layer, rotary positions in the half-split form whose
table does not depend on sequence length, and one K and V per token and head. Everything else fails closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PROVED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
PROVED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Support:
    """The verdict on a model. ``limit`` bounds prompt + output tokens for reuse (None: the window does).

    ``plain``: whether the plain way (``reuse="off"``) works. ``rope_switch``: the length beyond which the rotary
    table is another one, so that KV computed before is void (longrope).
    """

    ok: bool
    reason: str = ""
    limit: int | None = None
    limit_reason: str = ""
    plain: bool = True
    rope_switch: int | None = None

    @property
    def way_out(self) -> str:
        """What a refused user can do."""
        if not self.plain:
            return "load a decoder-only (causal) model"
        return 'use reuse="off" (plain prefill with the model\'s own attention and cache)'


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rope parameters of a transformers 5 config as one plain dict (empty when there are none)."""
    value = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(value)


def _refuse(reason: str) -> Support:
    return Support(ok=False, reason=reason)


def _special_layers(config: Any) -> str:
    kinds = {k for k in (getattr(config, "layer_types", None) or []) if k != "full_attention"}
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches a latent, not K and V"
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        return "ALiBi biases depend on absolute distance inside the attention, not on rotary keys"
    if kinds - {"sliding_attention"}:
        return f"layer types {sorted(kinds)} are not full attention"
    return ""


def _window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return window if isinstance(window, int) and window > 0 else None


def check_support(config: Any) -> Support:
    """Judge a model by its config."""
    if getattr(config, "is_encoder_decoder", False):
        return Support(ok=False, reason="encoder-decoder models have no single causal KV cache", plain=False)
    special = _special_layers(config)
    if special:
        return _refuse(special)
    if config.model_type not in PROVED_TYPES:
        return _refuse(f"model type {config.model_type!r} is not proved (proved: {', '.join(PROVED_TYPES)})")
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    limits: list[tuple[int, str]] = []
    switch: int | None = None
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if not original:
            return _refuse("longrope without its original length")
        switch = int(original)
        limits.append((switch, "longrope switches its table beyond its original length"))
    elif kind not in PROVED_ROPE:
        return _refuse(f"rope type {kind!r} depends on the sequence length or is not proved")
    window = _window(config)
    if window is not None:
        limits.append((window, "sliding-window attention drops keys beyond its window"))
    if limits:
        limit, why = min(limits)
        return Support(ok=True, limit=limit, limit_reason=why, rope_switch=switch)
    return Support(ok=True)
