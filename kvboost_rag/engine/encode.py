"""Compute blocks: several chunks in one forward, each after the same context, none seeing another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kvboost_rag.engine.context import Context, compute_context_kv
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import ModelError, TokenizerError, UsageError
from kvboost_rag.keys import block_key
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.compress import rounded_bytes_per_token
from kvboost_rag.kv.rope import turn
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.cache import CaptureCache
from kvboost_rag.store.base import BlockStore


class ChunkEncoder:
    """Turns chunk texts into blocks. ``contexts()`` names the contexts that a warm-up computes: always the canonical
    one, and the caller's own head where one was given (exact for a first chunk straight after that head). ``packs``:
    chunks of one forward lie one behind the other in a row of tokens instead of in padded rows of a batch (None: on
    CUDA). Of what memory is planned for, a forward may take ``max_batch_tokens`` (None: not bounded)."""

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
        packs: bool | None = None,
    ) -> None:
        self.adapter = adapter
        self.packs = adapter.spec.device.type == "cuda" if packs is None else packs
        self.max_batch_tokens = adapter.max_rows
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
        """One forward over several chunks, packed or right-padded to the longest; returns their blocks, on the CPU.
        Where the store has a tier on this device, they are there as well, as far as it has room.

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
            views = (self._packed if self.packs else self._padded)(chunks, context)
        near = self._near(views)
        computed = [view.to("cpu", copy=True).contiguous() for view in views]
        del views
        cost = (time.perf_counter() - started) / sum(lengths)  # by now a device has really done it
        blocks = []
        for i, (ids, own) in enumerate(zip(chunks, computed, strict=True)):
            if not torch.isfinite(own.sum(dtype=torch.float32)) and not torch.isfinite(own).all():
                raise ModelError(
                    f"{self.adapter.name} computes NaN or infinite KV for a chunk of {len(ids)} tokens in {own.dtype}",
                    hint='load it with dtype="bfloat16" or "float32"',
                )
            header = self._header(context, texts[i] if i < len(texts) else "", tags, cost * len(ids))
            blocks.append(Block(own, tuple(ids), header, device_kv=near[i]))
        return blocks

    def _near(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What the store's tier on this device may keep of ``views`` as it is; None where it must not, or has no room.
        The copies to host memory that follow wait for these: they can be read from any stream then."""
        near: list[torch.Tensor | None] = [None] * len(views)
        if self.store.device != self.adapter.spec.device or self.store.compression != "none":
            return near  # what is rounded comes back with other values
        if len(views) == 1:
            return [views[0].contiguous()]
        room = self.store.device_room(self.salt)
        for i, view in enumerate(views):
            room -= view.nbytes
            if room < 0:
                break
            try:
                near[i] = view.clone(memory_format=torch.contiguous_format)
            except torch.OutOfMemoryError:
                break
        return near

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

    def _padded(self, chunks: Sequence[tuple[int, ...]], context: str) -> list[torch.Tensor]:
        """K (un-rotated) and V of each chunk, one row of the batch each, padded to the longest."""
        context_kv, longest = self._context_kv(context), max(map(len, chunks))
        start = int(context_kv.shape[3])
        ids = torch.zeros(len(chunks), longest, dtype=torch.long)
        for i, c in enumerate(chunks):
            ids[i, : len(c)] = torch.tensor(c)
        captured = self.adapter.encode(ids.to(self.adapter.spec.device), start, context_kv)
        self.adapter.encoded.note(len(chunks), ids.numel() - sum(map(len, chunks)), packed=False)
        kv = self._collect(captured, lambda keys: self.adapter.rope.unrotate(keys, start))  # [L, 2, B, Hkv, n, D]
        return [kv[:, :, i, :, : len(c)] for i, c in enumerate(chunks)]

    def _packed(self, chunks: Sequence[tuple[int, ...]], context: str) -> list[torch.Tensor]:
        """The same from one row of tokens, without padding."""
        context_kv, lengths = self._context_kv(context), [len(c) for c in chunks]
        device, start = self.adapter.spec.device, int(context_kv.shape[3])
        ids = torch.tensor([i for c in chunks for i in c]).to(device)
        positions = torch.cat([torch.arange(start, start + n) for n in lengths]).to(device)
        captured = self.adapter.encode_packed(ids, positions, lengths, context_kv)
        self.adapter.encoded.note(len(chunks), 0, packed=True)
        table = self.adapter.rope.at(positions, back=True)
        kv = self._collect(captured, lambda keys: turn(keys, table))[:, :, 0]  # [L, 2, Hkv, T, D]
        return list(kv.split(lengths, dim=3))

    def _collect(self, captured: CaptureCache, unrotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What a forward left, of all layers in one piece: ``[num_layers, 2, batch, num_kv_heads, n, head_dim]``."""
        spec, first = self.adapter.spec, captured.layers_kv[0]
        assert first is not None, "every layer must have called the cache"
        out = torch.empty(spec.num_layers, 2, *first[0].shape, dtype=spec.dtype, device=spec.device)
        for layer, pair in enumerate(captured.layers_kv):
            assert pair is not None, "every layer must have called the cache"
            out[layer, 0] = unrotate(pair[0])
            out[layer, 1] = pair[1]
            captured.layers_kv[layer] = None  # its memory may go
        return out
