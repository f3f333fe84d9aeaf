"""A loaded model behind the few calls that the engine needs.

The forward over chosen tokens is an ordinary ``model(...)`` call: ``position_ids`` are the chosen positions, the cache
scatters into the composed buffers, and the attention function that transformers calls for us masks
``kv_position <= q_position``. With every position chosen this is a full prefill.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvboost_rag.errors import CapacityError, ModelError, UnsupportedModelError
from kvboost_rag.fingerprint import Fingerprint
from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.attention import NAME, CausalPlan, ContextPlan, Plan, register
from kvboost_rag.model.cache import CaptureCache, ForwardCut, KVCache, RequestCache, StopForward
from kvboost_rag.model.identity import adapter_state, fingerprint_model
from kvboost_rag.model.kernels import SDPA, Kernel, choose_kernel
from kvboost_rag.model.packed import ONE_BY_ONE, EncodeCounts, PackedKernel, PackedPlan, choose_packed
from kvboost_rag.model.support import Support, check_support

if TYPE_CHECKING:
    from kvboost_rag.model.paged.pool import PagePool
    from kvboost_rag.model.streaming.backend import Backend
    from kvboost_rag.plan import KVBudget


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers of a model that shape its KV and its window."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int  # positions that the model knows
    vocab_size: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def _spec(model: Any) -> ModelSpec:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # state-space models have none
    return ModelSpec(
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=model.dtype,
        device=next(model.parameters()).device,
        window=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
        vocab_size=int(config.vocab_size),
    )


class ModelAdapter:
    """Runs a causal language model for the engine and counts every row that it runs.

    Raises:
        UnsupportedModelError: not a decoder-only model; (from :meth:`require_reuse`) reuse is not proved for it.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "") -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self.spec = _spec(model)
        self.support: Support = check_support(model.config)
        if not self.support.plain:
            raise UnsupportedModelError(f"{self.name} cannot be used: {self.support.reason}", hint=self.support.way_out)
        self.own_attention = str(getattr(model.config, "_attn_implementation", "") or "sdpa")
        self.rows_forwarded = 0.0  # rows x share of layers, since loading
        self.lock = threading.RLock()  # one forward at a time
        self.max_rows: int | None = getattr(getattr(model, "kvboost_plan", None), "forward_rows", None)
        self.pages: PagePool | None = None  # where requests' KV comes from, once page_kv was called
        self.kernel: Kernel = SDPA  # of plainly causal attention; see choose_attention
        self.packed: PackedKernel = ONE_BY_ONE  # of packed chunks
        self.encoded = EncodeCounts()
        self._fingerprint: Fingerprint | None = None
        self._cache_kw = _cache_keyword(model)
        if self.support.ok:
            register()
            model.set_attn_implementation(NAME)
            self.rope = self._rope_table()

    def require_reuse(self) -> None:
        """Refuse an architecture that reuse is not proved for."""
        if not self.support.ok:
            raise UnsupportedModelError(
                f"KV reuse is not supported for {self.name}: {self.support.reason}", hint=self.support.way_out
            )

    @property
    def max_tokens(self) -> int:
        """Prompt plus output tokens that reuse may handle."""
        return min(self.spec.window, self.support.limit or self.spec.window)

    def runs_own_cache(self, total_tokens: int) -> bool:
        """Whether our cache and attention are sound for a request of this many positions."""
        return self.support.ok and total_tokens <= self.max_tokens

    @property
    def fingerprint(self) -> Fingerprint:
        """The model's identity; computed anew when the active adapters changed."""
        if self._fingerprint is None or self._fingerprint.adapter != adapter_state(self.model):
            self._fingerprint = fingerprint_model(self.model, self.tokenizer)
        return self._fingerprint

    def choose_attention(self, attn: str) -> None:
        """``"auto"``, or a kernel by name. Raises UnknownOptionError, UsageError."""
        s = self.spec
        heads = (s.num_heads, s.num_kv_heads)
        self.kernel = choose_kernel(attn, s.device, s.dtype, heads, s.head_dim)
        self.packed = choose_packed(self.kernel.name, s.device, s.dtype, heads, s.head_dim)

    def page_kv(self, budget: KVBudget, backend: Backend | None = None) -> None:
        """Requests' KV comes from a pool of pages of this size from now on, and spills to host memory beyond it.
        ``backend`` stands in for the device. Raises CapacityError, UnsupportedModelError."""
        from kvboost_rag.model.paged.pool import PagePool

        self.require_reuse()
        self.pages = PagePool(self.spec, budget, backend, self.lock)

    def new_cache(self, capacity: int) -> KVCache:
        """An uninitialised cache for one request of at most ``capacity`` positions."""
        return self.pages.new_cache(capacity) if self.pages is not None else self.new_buffer(capacity)

    def new_buffer(self, capacity: int) -> RequestCache:
        """An uninitialised cache in one piece, on the device."""
        s = self.spec
        shape = (s.num_layers, 2, s.num_kv_heads, capacity, s.head_dim)
        try:
            return RequestCache(torch.empty(shape, dtype=s.dtype, device=s.device))
        except torch.OutOfMemoryError as e:
            raise CapacityError(
                f"KV of {capacity} tokens takes {capacity * s.bytes_per_token / 2**30:.2f} GiB, {s.device} has less",
                hint="a shorter prompt or fewer new tokens; with vram=, plan for a longer context",
            ) from e

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        *,
        keep_logits: int = 1,
        plan: Plan | None = None,
    ) -> torch.Tensor:
        """One forward over ``token_ids [q]`` at ascending ``positions [q]``; returns logits ``[keep_logits, vocab]``
        of the last rows (0 keeps all). More rows than :attr:`max_rows` are forwarded in slices, in order: a row sees
        nothing that comes behind it. Only what corrects cached keys on the way needs all its rows at once."""
        rows = positions.numel()
        keep = keep_logits or rows
        with self.lock:
            sliced = self.max_rows is not None and plan is None and not cache.is_revised
            step = min(rows, self.max_rows) if sliced and self.max_rows else rows
            logits = []
            for a in range(0, rows, step):
                b = min(rows, a + step)
                wanted = keep - (rows - b)  # of this slice's last rows
                cache.at(positions[a:b])
                self._count(cache, b - a)
                kept = min(max(wanted, 1), b - a)
                own = plan or cache.plan(positions[a:b], last_layer=self.spec.num_layers - 1 if kept == 1 else -1)
                with self._cut_counts(cache, b - a, b - a):
                    out = self._call(token_ids[None, a:b], positions[None, a:b], cache, own, kept)
                if wanted > 0:
                    logits.append(out.logits[0])
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def probe(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, plan: Plan | None, *, layers: int
    ) -> None:
        """A forward that may stop early: ``plan`` or the cache raises :class:`StopForward` after ``layers`` layers."""
        with self.lock:
            cache.at(positions)
            rows = positions.numel() * layers / self.spec.num_layers
            self._count(cache, rows)
            with suppress(StopForward), self._cut_counts(cache, positions.numel(), rows):
                self._call(token_ids[None], positions[None], cache, plan or cache.plan(positions), 1)

    def _count(self, cache: KVCache, rows: float) -> None:
        """The honest cost of a request is counted here, where the model is called."""
        self.rows_forwarded += rows
        cache.rows += rows

    @contextmanager
    def _cut_counts(self, cache: KVCache, rows: int, counted: float) -> Iterator[None]:
        """Of a forward that is cut, the layers that it did run are counted."""
        try:
            yield
        except ForwardCut as cut:
            self._count(cache, rows * (cut.layer + 1) / self.spec.num_layers - counted)
            raise

    def encode(self, token_ids: torch.Tensor, start: int, context_kv: torch.Tensor) -> CaptureCache:
        """Run right-padded chunks ``token_ids [B, n]``, each at positions ``start..``, after one shared context."""
        n = token_ids.shape[1]
        cache = CaptureCache(self.spec.num_layers)
        positions = torch.arange(start, start + n, device=token_ids.device)[None]
        with self.lock:
            self.rows_forwarded += token_ids.numel()
            self._call(token_ids, positions.expand(token_ids.shape[0], -1), cache, ContextPlan(context_kv, n), 1)
        return cache

    def encode_packed(
        self, token_ids: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int], context_kv: torch.Tensor
    ) -> CaptureCache:
        """Run chunks of ``lengths`` tokens, one behind the other in ``token_ids [T]``, after one shared context. No
        chunk sees another; ``positions [T]`` begin anew behind the context for each."""
        cache = CaptureCache(self.spec.num_layers)
        with self.lock:
            self.rows_forwarded += token_ids.numel()
            plan = PackedPlan(context_kv, lengths, self.packed)
            self._call(token_ids[None], positions[None], cache, plan, 1)
        return cache

    @torch.inference_mode()
    def _call(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any, plan: Plan, keep: int) -> Any:
        if getattr(self.model.config, "_attn_implementation", NAME) != NAME:
            self.model.set_attn_implementation(NAME)  # somebody set it back: another function would ignore the plan
        if isinstance(plan, CausalPlan):
            plan.kernel = self.kernel
        # A 4-D mask is passed through untouched, so no causal mask is built that the plan would ignore.
        skip_mask = torch.zeros(1, 1, 1, 1, dtype=self.spec.dtype, device=ids.device)
        kwargs = {self._cache_kw: cache}
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=skip_mask,
            use_cache=True,
            logits_to_keep=keep,
            kvboost_plan=plan,
            **kwargs,
        )

    def plain_forward(self, token_ids: torch.Tensor, cache: Any, start: int) -> tuple[torch.Tensor, Any]:
        """The model's own attention and cache, for architectures without reuse: logits ``[1, vocab]`` and cache."""
        positions = torch.arange(start, start + token_ids.numel(), device=token_ids.device)[None]
        self.rows_forwarded += token_ids.numel()
        kwargs = {self._cache_kw: cache} if cache is not None else {}
        with self.lock, torch.inference_mode():
            out = self.model(input_ids=token_ids[None], position_ids=positions, use_cache=True, **kwargs)
        return out.logits[0, -1:], getattr(out, "cache", None) or getattr(out, "past_key_values", None)

    def _rope_table(self) -> RopeTable:
        module = _rotary_module(self.model)
        probe = torch.zeros(1, dtype=torch.float32, device=self.spec.device)

        def compute(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = module(probe, position_ids.clone())
            return cos.clone(), sin.clone()

        return RopeTable(
            compute,
            scaling=float(getattr(module, "attention_scaling", 1.0)),
            device=self.spec.device,
            limit=self.max_tokens,
        )


def _rotary_module(model: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    found = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if not found:
        raise ModelError(f"{type(model).__name__} has no rotary_emb module", hint='use reuse="off"')
    return found[0]  # type: ignore[no-any-return]


def _cache_keyword(model: Any) -> str:
    """``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    import transformers
    from packaging.version import Version

    return "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
