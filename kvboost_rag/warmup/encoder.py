"""What the warm-up needs of an engine: a protocol, so that this layer knows neither models nor stores' insides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the command line's --help must not import torch
    from kvboost_rag.kv.block import Block
    from kvboost_rag.store.base import BlockStore

CANONICAL = "canonical"


class Encoder(Protocol):
    """Computes blocks with one model for one store."""

    @property
    def store(self) -> BlockStore: ...

    @property
    def max_chunk_tokens(self) -> int:
        """The longest chunk that fits the model's window after its context."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in a block, as stored."""

    @property
    def packs(self) -> bool:
        """Whether chunks of one forward are packed: no padding, whatever their lengths."""

    @property
    def max_batch_tokens(self) -> int | None:
        """Token slots that one forward may have; None: as many as are asked for."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Stripped chunk text to ids, with special-token parsing off."""

    def key(self, token_ids: tuple[int, ...], context: str = CANONICAL) -> str:
        """The key of the block of ``token_ids`` after ``context`` (``"canonical"`` or the digest of a head)."""

    def contexts(self) -> list[str]:
        """The contexts to encode each chunk after; ``"canonical"`` first."""

    def encode(
        self,
        chunks: Sequence[tuple[int, ...]],
        *,
        texts: Sequence[str],
        context: str = CANONICAL,
        tags: Sequence[str] = (),
    ) -> list[Block]:
        """One block per chunk, in order, all from one forward. ``tags`` go onto every block."""

    def register(self, items: Sequence[tuple[str, str]]) -> None:
        """Make texts known to the store's anchors: pairs of stripped text and canonical key. Known pairs are no-ops."""
