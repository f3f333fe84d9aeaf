"""A block: the keys and values of one chunk, all layers, position-free.

``kv`` has shape ``[num_layers, 2, num_kv_heads, num_tokens, head_dim]``; index 0 of the second axis is K **without**
rotation, index 1 is V. A block says in its own header what it is: whoever reads one trusts the header, never the name
that it was found under.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.keys import block_key
from kvboost_rag.kv.quantize import Packed

FORMAT_VERSION = 3  # of what is written; kv/fields.py has those that are read


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block is: enough to rebuild its key and to refuse it."""

    fingerprint: str  # Fingerprint.digest of the model that computed it
    context: str  # keys.context_digest of what it was computed after
    context_kind: str  # "canonical" | "head"
    salt: str = ""  # tenant salt
    attention: str = ""  # recorded, not keyed
    text: str = ""  # the chunk's text, only where the store was asked to keep it
    tags: tuple[str, ...] = ()  # free labels (document id, source), for delete-by-tag
    created_s: float = 0.0  # unix time
    cost_s: float = 0.0  # seconds of compute that the block saves
    compression: str = "none"  # what K and V went through; "none": they are as the model computed them
    format_version: int = FORMAT_VERSION  # what it was read from; every block is written in the present one

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "tags": list(self.tags)}


@dataclass(frozen=True, slots=True)
class Block:
    """K and V of one chunk. Immutable by contract: nobody writes into ``kv`` after construction.

    Raises:
        BlockFormatError: ``kv`` and ``token_ids`` disagree in shape.
    """

    kv: torch.Tensor  # [num_layers, 2, num_kv_heads, num_tokens, head_dim]; K un-rotated
    token_ids: tuple[int, ...]
    header: BlockHeader
    key: str = field(default="")
    packed: Packed | None = field(default=None, repr=False, compare=False)  # what ``kv`` was unpacked from
    device_kv: torch.Tensor | None = field(default=None, repr=False, compare=False)  # ``kv``, where it was computed

    def __post_init__(self) -> None:
        if self.kv.dim() != 5 or self.kv.shape[1] != 2 or self.kv.shape[3] != len(self.token_ids):
            raise BlockFormatError(
                f"kv of shape {tuple(self.kv.shape)} does not fit {len(self.token_ids)} token ids",
                hint="expected [num_layers, 2, num_kv_heads, num_tokens, head_dim]",
            )
        if not self.key:
            object.__setattr__(self, "key", self.derive_key())

    def derive_key(self) -> str:
        """The key that this block's own header and token ids lead to."""
        h = self.header
        return block_key(h.fingerprint, h.context, self.token_ids, h.salt)

    @property
    def num_tokens(self) -> int:
        return int(self.kv.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.kv.numel() * self.kv.element_size()
