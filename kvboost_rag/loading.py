"""Load a model for an engine: what the engine's options keep on the device is taken off the plan for the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvboost_rag.engine.carrier import device_bytes
from kvboost_rag.engine.context import FILLER_TOKENS
from kvboost_rag.model.load import LoadedModel, load_model
from kvboost_rag.plan import Budget, kv_budget
from kvboost_rag.store.device_tier import bytes_of


def load_for_engine(
    name: str | Path,
    options: dict[str, Any],
    *,
    vram: str | int | Budget | None,
    backend: Any,
    **how: Any,
) -> LoadedModel:
    """The model for an engine with these ``options`` (:class:`~kvboost_rag.KVBoost`'s), which are completed here.
    ``how`` is for :func:`~kvboost_rag.model.load.load_model` as it is: dtype, device, revision, trust_remote_code.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, UnknownOptionError, UsageError, CapacityError: see
        :meth:`KVBoost.from_pretrained`.
    """
    held, kv = (0, 0), options.get("kv_vram")
    if vram is not None:
        context = options.get("filler_tokens", FILLER_TOKENS) + 64 if options.get("reuse") != "off" else 0
        # Held pages move to host memory when the device needs theirs; held buffers stay where they are.
        prefixes = 0 if kv is not None else options.setdefault("prefix_bytes", 0)
        held = (prefixes + device_bytes(vram, backend, **options), context)
    if kv is not None:
        options["kv_vram"] = kv_budget(kv)
    options.setdefault("kv_backend", backend)
    return load_model(
        name,
        vram=vram,
        backend=backend,
        held=held,
        kv=None if kv is None else kv_budget(kv).nbytes,
        stored=bytes_of(options.get("store_vram")),
        **how,
    )
