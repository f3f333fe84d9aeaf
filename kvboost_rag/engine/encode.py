"""Compute blocks: several chunks in one forward, each after the same context, none seeing another."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvboost_rag.engine.context import Context, compute_context_kv
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import ModelError, TokenizerError, UsageError
from kvboost_rag.keys import block_key
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.compress import rounded_bytes_per_token
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.store.base import BlockStore


class ChunkEncoder:
    """Turns chunk texts into blocks. ``contexts()`` names the contexts that a warm-up computes: always the canonical
    one, and the caller's own head where one was given (exact for a first chunk straight after that head)."""

    def __init__(
        self,
        adapter: ModelAdapter,
        tokens: SpanTokenizer,
        store: BlockStore,
        canonical: Context,
        *,
        head: Context | None = None,
        salt: str = "",
        keep_text: bool = False,
    ) -> None:
        self.adapter = adapter
        self.tokens = tokens
        self.store = store
        self.salt = salt
        self.keep_text = keep_text
        self._contexts = {"canonical": canonical} | ({head.digest: head} if head else {})
        self._kv: dict[tuple[str, str], torch.Tensor] = {}  # by fingerprint: adapters can be switched
        longest = max(len(c.token_ids) for c in self._contexts.values())
        self.max_chunk_tokens = adapter.max_tokens - longest
        self.bytes_per_token = adapter.spec.bytes_per_token  # as stored
        if store.compression != "none":
            s = adapter.spec
            self.bytes_per_token = rounded_bytes_per_token(store.compression, s.num_layers, s.num_kv_heads, s.head_dim)

    def contexts(self) -> list[str]:
        """Names of the contexts to encode after."""
        return list(self._contexts)

    def context_digest(self, context: str = "canonical") -> str:
        """The digest that stands for ``context`` in keys."""
        return self._contexts[context].digest

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk (outer whitespace stripped), special-token parsing off.

        Raises:
            UsageError: the chunk has no text.
            TokenizerError: the tokenizer does not give this text back.
        """
        stripped = text.strip()
        if not stripped:
            raise UsageError("the chunk is empty")
        ids = self.tokens.chunk(stripped)
        if ids is None:
            raise TokenizerError(
                f"the tokenizer does not give this text back: {stripped[:40]!r}…",
                hint="its normaliser changes the text; such a chunk is prefilled as plain text each time",
            )
        return ids

    def key(self, token_ids: Sequence[int], context: str = "canonical") -> str:
        """The block key of a chunk after ``context``."""
        return block_key(self.adapter.fingerprint.digest, self.context_digest(context), token_ids, self.salt)

    def register(self, items: Sequence[tuple[str, str]]) -> None:
        """Make chunk texts findable: ``(text, key)`` pairs."""
        self.store.anchors.add([(text.strip(), key) for text, key in items], self.salt)

    def encode(
        self,
        chunks: Sequence[tuple[int, ...]],
        *,
        texts: Sequence[str] = (),
        context: str = "canonical",
        tags: Sequence[str] = (),
    ) -> list[Block]:
        """One forward over several chunks (right-padded to the longest); returns their blocks, on the CPU.

        Raises:
            UsageError: a chunk is empty or longer than :attr:`max_chunk_tokens`.
            ModelError: the model's KV is not finite; it would spoil every prompt that it is composed into.
        """
        lengths = [len(c) for c in chunks]
        if not chunks or min(lengths) == 0 or max(lengths) > self.max_chunk_tokens:
            raise UsageError(
                f"chunks of {lengths} tokens; each must have 1 to {self.max_chunk_tokens}",
                hint="the model's window must hold the context and the chunk; split longer chunks",
            )
        started = time.perf_counter()
        with self.adapter.lock, torch.inference_mode():
            kv = self._forward(chunks, max(lengths), context)  # [L, 2, B, Hkv, n, D]
        cost = (time.perf_counter() - started) / sum(lengths)
        blocks = []
        for i, ids in enumerate(chunks):
            own = kv[:, :, i, :, : len(ids)].to("cpu", copy=True).contiguous()
            if not torch.isfinite(own.sum(dtype=torch.float32)) and not torch.isfinite(own).all():
                raise ModelError(
                    f"{self.adapter.name} computes NaN or infinite KV for a chunk of {len(ids)} tokens in {own.dtype}",
                    hint='load it with dtype="bfloat16" or "float32"',
                )
            header = self._header(context, texts[i] if i < len(texts) else "", tags, cost * len(ids))
            blocks.append(Block(own, tuple(ids), header))
        return blocks

    def _header(self, context: str, text: str, tags: Sequence[str], cost_s: float) -> BlockHeader:
        which = self._contexts[context]
        return BlockHeader(
            fingerprint=self.adapter.fingerprint.digest,
            context=which.digest,
            context_kind=which.kind,
            salt=self.salt,
            attention=self.adapter.own_attention,
            text=text.strip() if self.keep_text else "",
            tags=tuple(tags),
            created_s=time.time(),
            cost_s=cost_s,
        )

    def _context_kv(self, context: str) -> torch.Tensor:
        name = (self.adapter.fingerprint.digest, context)
        if name not in self._kv:
            self._kv[name] = compute_context_kv(self.adapter, self._contexts[context])
        return self._kv[name]

    def _forward(self, chunks: Sequence[tuple[int, ...]], longest: int, context: str) -> torch.Tensor:
        spec = self.adapter.spec
        context_kv = self._context_kv(context)
        start = context_kv.shape[3]
        ids = torch.zeros(len(chunks), longest, dtype=torch.long)
        for i, c in enumerate(chunks):
            ids[i, : len(c)] = torch.tensor(c)
        captured = self.adapter.encode(ids.to(spec.device), start, context_kv)
        shape = (spec.num_layers, 2, len(chunks), spec.num_kv_heads, longest, spec.head_dim)
        out = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        for layer, pair in enumerate(captured.layers_kv):
            assert pair is not None, "every layer must have called the cache"
            out[layer, 0] = self.adapter.rope.unrotate(pair[0], start)
            out[layer, 1] = pair[1]
        return out
