"""The public facade: ``KVBoost``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvboost_rag.answers import Answers
from kvboost_rag.config import Repair, Reuse, check_reuse, resolve_repair
from kvboost_rag.engine.arrivals import check_overlap
from kvboost_rag.engine.carrier import Carry, carrier_for
from kvboost_rag.engine.context import FILLER_TOKENS, canonical_context, head_context
from kvboost_rag.engine.cost import CostModel
from kvboost_rag.engine.encode import ChunkEncoder
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.figures import figures
from kvboost_rag.engine.guard import OnLowFidelity, check_mode
from kvboost_rag.engine.spot import SpotChecker, check_share
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import UsageError
from kvboost_rag.loading import load_for_engine
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.plan import Budget, KVBudget, kv_budget
from kvboost_rag.store.base import BlockStore
from kvboost_rag.store.device import DeviceStore
from kvboost_rag.store.device_tier import with_device
from kvboost_rag.store.open import open_store
from kvboost_rag.warmup import SourceChunk, WarmPlan, WarmProgress, WarmReport, plan, warm

if TYPE_CHECKING:
    from kvboost_rag.verify import VerifyReport

Head = str | Sequence[Mapping[str, Any]]
DEFAULT_STORE = "~/.cache/kvboost-rag"
DEFAULT_PREFIX_BYTES = 1 << 30


class KVBoost(Answers):
    """A language model whose retrieved chunks skip prefill.

    Args:
        model: a loaded ``transformers`` causal language model (PEFT, bitsandbytes, device_map are fine).
        tokenizer: its fast tokenizer.
        store: a folder, ``"memory"``, None (off), or a :class:`BlockStore`.
        reuse: ``"chunks"``, ``"prefix"`` (exact reuse only) or ``"off"`` (plain prefill, the baseline).
        repair: ``"fast"``, ``"balanced"``, ``"faithful"`` or a :class:`Repair` value.
        filler: prose that blocks are computed after (default: the package's own English text); part of every key.
        filler_tokens: how much of it; never more than a quarter of the model's window.
        alone: compute blocks without any context (the naive baseline: for measuring, not for use).
        salt: tenant salt; the same text under another salt never hits.
        prefix_bytes: budget for KV of earlier requests (conversation turns, repeated prompts).
        memory_bytes, disk_bytes: budgets of the store's tiers.
        store_vram: memory of the device for a tier in front of the store (``"2GiB"``, bytes, or a
            :class:`~kvboost_rag.store.DeviceStore`): blocks that were used lie there, and composing is a copy inside
            the device. Delete through :attr:`store`, which has the tier in front then. None: no such tier.
        tenant_bytes: most bytes of one tenant's blocks (see :func:`open_store`).
        keep_text: keep chunk texts in block headers (off: token ids alone).
        attn: kernel of plainly causal attention: ``"auto"`` (what works here), ``"flash-attn"``, ``"varlen"`` (torch's
            own) or ``"sdpa"``; ``stats()["attention"]`` says which it is and why. Masked rows go through SDPA always.
        kv_vram: memory of the device for requests' KV (``"2GiB"``, bytes, or a
            :class:`~kvboost_rag.plan.KVBudget`): what goes beyond it spills to host memory, page by page, and is
            attended to there, exactly. None: each request's KV is one buffer on the device.
        kv_backend: stands in for the device (tests).
        compression: ``"none"``, ``"int8"``, ``"int4"``, ``"zstd"`` (exact), ``"int8+zstd"`` or ``"int4+zstd"`` for what
            the store keeps; None: as the store's folder says.
        on_low_fidelity: what to do where the store's verdict on a request's policy (see :meth:`verify`) is that it
            failed: ``"warn"`` (log, once), ``"repair"`` (answer with ``"faithful"`` if that one passed, else by full
            prefill), ``"full"`` (full prefill), ``"ignore"``. Each but the last also logs once that reuse which nobody
            verified is used.
        cost_model: recompute a request whose reuse would take longer, by what this machine was measured to do; the
            report says so. Such an answer is exact, so that an answer can change once the machine is known.
        spot_check: about this share of the approximate answers (0.01: one in a hundred) is compared with full prefill
            in idle time; :meth:`stats` has the figures.
        overlap: ``"auto"``: blocks from tiers slower than memory are used layer by layer as they come in, the answer is
            the same; False: they are waited for.
        carry: ``"auto"``: on a CUDA device, blocks in memory are kept page-locked (up to ``memory_bytes``, where the
            system allows) and cross to the device layer by layer while the forward runs, the answer is the same; False:
            ordinary memory, copied before the forward. On a CPU there is nothing to carry.

    Raises:
        UnsupportedModelError: reuse is asked for and not proved for this architecture.
        StoreError: the store cannot be opened.
        CapacityError: ``kv_vram`` is too small (the smallest that works is named), or the device has less than it or
            ``store_vram``.
        UsageError: an option makes no sense, such as ``store_vram`` on a CPU.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        store: str | Path | BlockStore | None = DEFAULT_STORE,
        reuse: Reuse = "chunks",
        repair: str | Repair = "balanced",
        filler: str | None = None,
        filler_tokens: int = FILLER_TOKENS,
        alone: bool = False,
        salt: str = "",
        prefix_bytes: int = DEFAULT_PREFIX_BYTES,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        tenant_bytes: int | None = None,
        keep_text: bool = False,
        compression: str | None = None,
        on_low_fidelity: OnLowFidelity = "warn",
        cost_model: bool = False,
        spot_check: float = 0.0,
        overlap: Literal["auto", False] = "auto",
        store_vram: str | int | DeviceStore | None = None,
        carry: Carry = "auto",
        attn: str = "auto",
        kv_vram: str | int | KVBudget | None = None,
        kv_backend: Any = None,
        name: str = "",
    ) -> None:
        if isinstance(model, (str, Path)):
            raise UsageError(
                "KVBoost takes a loaded model, got a name", hint=f"KVBoost.from_pretrained({str(model)!r})"
            )
        if prefix_bytes < 0:
            raise UsageError(f"prefix_bytes must not be negative, got {prefix_bytes}", hint="0 holds no prefix")
        self.reuse: Reuse = check_reuse(reuse)
        check_mode(on_low_fidelity)
        share, overlapped = check_share(spot_check), check_overlap(overlap)
        self.repair = resolve_repair(repair)
        self.adapter = ModelAdapter(model, tokenizer, name=name)
        if self.reuse != "off":
            self.adapter.require_reuse()
        self.adapter.choose_attention(attn)
        if kv_vram is not None:
            self.adapter.page_kv(kv_budget(kv_vram), kv_backend)
        self.tokens = SpanTokenizer(tokenizer)
        supported = self.adapter.support.ok
        self.store = open_store(
            store if supported else None,
            memory_bytes=memory_bytes,
            limit_bytes=disk_bytes,
            tenant_bytes=tenant_bytes,
            keep_text=keep_text,
            compression=compression,
        )
        if store_vram is not None and supported:
            self.store = with_device(store_vram, self.store, self.adapter.spec.device, keep_text=keep_text)
        carrier = carrier_for(self.adapter, carry, kv_backend)
        if carrier is not None or carry is False:
            self.store.keep_in(None if carrier is None else carrier.memory)
        self._canonical = canonical_context(self.adapter, self.tokens, self.store, filler, filler_tokens, alone=alone)
        self._keep_text = keep_text
        self._salt = salt
        self._encoder = self.encoder()
        self.engine = Engine(
            self.adapter,
            self.tokens,
            self._encoder,
            prefix_bytes=prefix_bytes,
            on_low_fidelity=on_low_fidelity,
            costs=CostModel(self.adapter, self.store, overlap=overlapped) if cost_model and supported else None,
            spot=SpotChecker(self.adapter, share) if share and supported else None,
            overlap=overlapped,
            carrier=carrier,
        )
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvboost")

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        store: str | Path | BlockStore | None = DEFAULT_STORE,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        vram: str | int | Budget | None = None,
        backend: Any = None,
        **options: Any,
    ) -> KVBoost:
        """Load a model by hub id, local folder, ``.gguf`` file, or ``"smollm2"`` (the small embedded default).

        ``options`` are those of the constructor. ``vram`` (``"8GiB"``, bytes, ``"auto"``, or a
        :class:`kvboost_rag.plan.Budget`) is how much GPU memory may be used, ``store_vram`` included: layers that do
        not fit are streamed from host memory, see ``docs/big-models.md``; earlier requests' KV is then held only as far
        as ``prefix_bytes`` says. ``backend`` stands in for the CUDA device (tests).

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError, UnknownOptionError, StoreError.
            CapacityError: the model does not fit, or ``vram`` is too small (the smallest that works is named).
        """
        loaded = load_for_engine(
            name,
            options,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            vram=vram,
            backend=backend,
        )
        return cls(loaded.model, loaded.tokenizer, store=store, name=loaded.name, **options)

    @property
    def model(self) -> Any:
        """The transformers model; it still works on its own."""
        return self.adapter.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.adapter.tokenizer

    # -- warm-up -----------------------------------------------------------------------------------------------------

    def encoder(self, head: Head | None = None, packs: bool | None = None) -> ChunkEncoder:
        """What a warm-up job computes with; ``head`` and ``packs`` as in :meth:`warm`."""
        return ChunkEncoder(
            self.adapter,
            self.tokens,
            self.store,
            self._canonical,
            head=head_context(self.tokens, head) if head is not None else None,
            salt=self._salt,
            keep_text=self._keep_text,
            packs=packs,
        )

    def warm(
        self,
        texts: Iterable[str | SourceChunk],
        *,
        head: Head | None = None,
        progress: bool | Callable[[WarmProgress], None] = False,
        shard: tuple[int, int] | None = None,
        batch_tokens: int = 2048,
        packs: bool | None = None,
        tags: Sequence[str] = (),
    ) -> WarmReport:
        """Compute and store the blocks of ``texts`` that the store lacks; can be interrupted and run again.

        ``head`` also computes each chunk after your own head (system prompt, messages, or rendered text): exact for
        the first chunk straight after it. ``shard=(i, n)`` takes the i-th of n disjoint shares. A forward takes
        ``batch_tokens`` slots; with ``packs`` its chunks share one row, and none sees another (None: on CUDA).
        New blocks carry ``tags``, their document's name and their chunk's id: ``store.delete_tagged`` goes by them.
        """
        self.adapter.require_reuse()
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UsageError(f"warm takes several texts, got {type(texts).__name__}", hint="pass [text]")
        encoder = self.encoder(head, packs)
        with self.engine.busy():
            return warm(encoder, texts, progress=progress, shard=shard, batch_tokens=batch_tokens, tags=tags)

    def plan_warm(self, texts: Iterable[str | SourceChunk], *, head: Head | None = None) -> WarmPlan:
        """What :meth:`warm` would do: chunks, tokens, bytes and an estimate of the time. Stores nothing."""
        self.adapter.require_reuse()
        return plan(texts, self.encoder(head))

    def verify(self, items: Iterable[Any], **options: Any) -> VerifyReport:
        """What reuse changes in the answers to ``items``: KL, agreement and changed answers against full prefill.

        Items are mappings with ``question`` and ``passages``, or ``messages`` (or ``prompt``) and ``chunks``. Options:
        ``policy`` (default: this engine's repair), ``max_new_tokens`` (32), ``max_kl`` (0.1), ``min_agreement`` (0.9),
        ``progress``, ``keep`` (True: the verdict is kept in the store, see ``on_low_fidelity``). See
        :func:`kvboost_rag.verify.verify`.
        """
        from kvboost_rag.verify import verify

        return verify(self, items, **options)

    # -- state -------------------------------------------------------------------------------------------------------

    def stats(self, *, sizes: bool = True) -> dict[str, object]:
        """The store's counters, what the requests came to, what the prefix cache holds; what was streamed, which
        attention kernel runs, how chunks were encoded, what was paged, what was carried to the device and how much of
        the store's memory is page-locked, figures of ``cost_model`` and ``spot_check`` (None: there is none). Without
        ``sizes``, a server's blocks are not counted: for being asked every few seconds.
        """
        return figures(self.engine, self.store, sizes=sizes)

    def forget(self) -> None:
        """Let go of held prefixes (conversations); the store stays."""
        self.engine.prefixes.clear()

    def close(self) -> None:
        """Release the store's handles and the worker threads. Safe to call twice."""
        if self.engine.spot is not None:
            self.engine.spot.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()
        if self.engine.carrier is not None:
            self.engine.carrier.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
