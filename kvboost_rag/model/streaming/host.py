"""The two tables that may stay in host memory: embedding rows are looked up there, the output matrix multiplied there.

Their weights are plain attributes, not parameters: ``model.to(...)`` leaves them, and ``model.device`` stays the GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class HostEmbedding(nn.Module):
    """``weight [vocab, hidden]`` in host memory; a token's row (a few KiB) goes to ``device``."""

    def __init__(self, weight: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        self.weight, self._device = weight, device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids.to(self.weight.device), self.weight).to(self._device)


class HostLinear(nn.Module):
    """``weight [out, in]`` in host memory; multiplied on the CPU, for where the GPU has no room for it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.device), self.weight).to(x.device)
