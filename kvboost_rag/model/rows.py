"""Bounded activations: what a forward over many rows needs at once.

The widest part of a layer by far is its MLP, which knows nothing of other rows: it is computed for some rows at a time.
That changes no result and costs no second pass over streamed weights. What is left per row (hidden states, queries,
outputs) bounds the rows of one forward; beyond that the adapter forwards them in slices, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def slice_mlps(model: nn.Module, max_rows: int) -> int:
    """Make every layer's MLP take at most ``max_rows`` rows at a time; returns how many MLPs there are."""
    found = [m for name, m in model.named_modules() if name.split(".")[-1] == "mlp"]
    for mlp in found:
        _wrap(mlp, max_rows)
    return len(found)


def _wrap(mlp: Any, max_rows: int) -> None:
    whole = mlp.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if flat.shape[0] <= max_rows or args or kwargs:
            return whole(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        out = torch.empty_like(flat)
        for a in range(0, flat.shape[0], max_rows):
            out[a : a + max_rows] = whole(flat[None, a : a + max_rows])[0]
        return out.view(hidden.shape)

    mlp.forward = forward
