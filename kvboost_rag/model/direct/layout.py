"""One module's tensors in one contiguous blob, at 256-byte aligned offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 256  # of every tensor, and of every blob's length


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a layout; ``name`` is relative to the module."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a module's weights lie in its blob of ``nbytes`` bytes (uint8)."""

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of all weights below ``module`` (parameters and persistent buffers; may be meta)."""
        entries, at = [], 0
        for name, tensor in weights(module):
            nbytes = tensor.numel() * tensor.element_size()
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), at, nbytes))
            at += aligned(nbytes)
        return cls(tuple(entries), at)

    def views(self, blob: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in ``blob`` (uint8, at least ``nbytes`` long), by name. No copies."""
        return {e.name: blob[e.offset : e.offset + e.nbytes].view(e.dtype).view(e.shape) for e in self.entries}

    def bind(self, module: nn.Module, blob: torch.Tensor) -> None:
        """Make the module's weights views into ``blob``."""
        for name, view in self.views(blob).items():
            set_weight(module, name, view)


def weights(module: nn.Module, *, duplicates: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers below ``module`` by name; shared ones once unless ``duplicates``."""
    yield from module.named_parameters(remove_duplicate=not duplicates)
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def set_weight(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the parameter or buffer ``name`` below ``module``."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[attribute] = tensor
