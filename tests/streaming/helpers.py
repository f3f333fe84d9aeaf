"""Tiny streamed models on the stand-in device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvboost_rag import KVBoost
from kvboost_rag.model.direct.files import CheckpointFiles
from kvboost_rag.model.direct.skeleton import build_skeleton
from kvboost_rag.model.load import load_model
from kvboost_rag.model.streaming.load import measure
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import Budget, Weights

IDS = torch.arange(10, 60)[None]
CONTEXT = 64


def weights_of(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """The real sizes of the checkpoint's parts as they would be loaded."""
    from transformers import AutoConfig

    return measure(build_skeleton(AutoConfig.from_pretrained(path), CheckpointFiles(path), dtype), str(path))


def budget_for(path: Path, resident: int, *, head: bool = True, slots: int = 2, **options: Any) -> Budget:
    """The smallest budget with ``resident`` layers on the device; ``head``: and the output matrix."""
    w = weights_of(path)
    vram = w.rest + w.kv_per_token * CONTEXT + (w.head if head else 0) + (resident + slots) * w.layers[0]
    return Budget(vram=vram, context=CONTEXT, reserve=0, workspace=0, slots=slots, **options)


def load_streamed(path: Path, budget: Budget, backend: VirtualBackend | None = None, **options: Any) -> Any:
    """The model, through the public loader."""
    return load_model(path, device="cpu", vram=budget, backend=backend or VirtualBackend(), **options).model


def streamed_engine(path: Path, budget: Budget, backend: VirtualBackend | None = None, **options: Any) -> KVBoost:
    """The engine, through the public facade. What chunks are computed after takes one token of the tiny budget."""
    budget = replace(budget, context=CONTEXT - 1, held_tokens=1)
    options = {"store": "memory", "filler_tokens": 48, **options}
    return KVBoost.from_pretrained(path, device="cpu", vram=budget, backend=backend or VirtualBackend(), **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits
