"""Read a Hugging Face checkpoint (folder or hub id), and turn everything that can be wrong with it into our errors."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost_rag.errors import (
    CheckpointError,
    KVBoostError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from kvboost_rag.model.awq.format import AwqFormat, quantization_of

if TYPE_CHECKING:
    from kvboost_rag.model.streaming.backend import Backend
    from kvboost_rag.plan import Budget

    Streaming = tuple[Budget, Backend]  # what may be used of the device, and the device

# quant_method of a checkpoint → (module that must be there, how to install it)
QUANTIZERS = {
    "aqlm": ("aqlm", "aqlm"),
    "auto-round": ("auto_round", "auto-round"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "eetq": ("eetq", "eetq"),
    "fp8": ("torch", "torch"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "hqq": ("hqq", "hqq"),
    "mxfp4": ("torch", "torch"),
    "quanto": ("optimum", "optimum-quanto"),
    "torchao": ("torchao", "torchao"),
}
MIN_VOCABULARY = 16  # an "empty" tokenizer, built from a config without its vocabulary file, has fewer


def load_checkpoint(
    source: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
    streaming: Streaming | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer of ``source``. Cheap checks first, weights last; the model may still be on the CPU.

    ``dtype=None``: the checkpoint's own, except that float16 becomes float32 on a CPU.
    """
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = _load_config(source, common)
    if streaming is not None:
        _check_streamed(source, config)
    _check_config(source, config)
    tokenizer = _load_tokenizer(source, common)
    if streaming is not None:
        model = _load_streamed(source, config, dtype or _own_dtype(config, device), device, common, streaming)
    else:
        model = _load_weights(source, config, dtype=dtype, device=device, common=common)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def offline_hint() -> str:
    """What to say when a hub id was not found: whether this process may ask the hub at all."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").lower() in ("1", "on", "yes", "true"):
            return f"{variable} is set, so only the local hub cache was searched; unset it, or give a local folder"
    return "check the spelling, the network and the access token, or give a local folder"


def first_line(error: BaseException) -> str:
    """What a foreign error says, short enough for a message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _load_config(source: str | Path, common: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json", hint="give the folder of a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(str(source), **common)
    except Exception as e:
        raise _config_error(source, e) from e


def _config_error(source: str | Path, error: Exception) -> KVBoostError:
    text = str(error)
    if "trust_remote_code" in text:
        return UnsupportedModelError(
            f"{source} brings its own model code", hint="read that code, then pass trust_remote_code=True"
        )
    if "does not recognize this architecture" in text:
        return UnsupportedModelError(
            f"{source}: {first_line(error)[:160]}", hint="a newer transformers may know it; see the supported range"
        )
    if isinstance(source, Path) or not isinstance(error, OSError) or "valid JSON" in text:
        return CheckpointError(f"the config of {source} cannot be read: {first_line(error)}")
    return ModelNotFoundError(f"no model {source!r}: no such local path, and not found on the hub", hint=offline_hint())


def _check_config(source: str | Path, config: Any) -> None:
    """Refuse what is not a causal language model, and quantisation that cannot be read here."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    names = list(getattr(config, "architectures", None) or [])
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(source, f"an encoder-decoder ({config.model_type})")
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not remote and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unsupported(source, f"not a causal language model ({config.model_type})")
    # Encoders such as BERT have a causal head in transformers, which their checkpoints were not trained for.
    if any(part in name for name in names for part in ("MaskedLM", "Classification", "QuestionAnswering", "ForPre")):
        raise _unsupported(source, f"not a causal language model ({', '.join(names)})")
    _check_quantization(source, config)


def _check_streamed(source: str | Path, config: Any) -> None:
    """First: that a package is missing for what is not streamed anyway would send people the wrong way."""
    method = quantization_of(config).get("quant_method", "awq")
    if method != "awq":
        raise UnsupportedModelError(
            f"{source} is quantised with {method}: only AWQ and plain weights are streamed", hint="leave vram out"
        )


def _unsupported(source: str | Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{source} is {what}", hint="a decoder-only model is needed, such as Llama or Qwen")


def _check_quantization(source: str | Path, config: Any) -> None:
    quantization = quantization_of(config)
    if not quantization:
        return
    method = quantization["quant_method"]
    if method == "awq":  # read by our own loader
        AwqFormat.parse(source, quantization)
        return
    if method not in QUANTIZERS:
        # transformers would skip an unknown method with a warning and read packed weights as if they were plain.
        raise UnsupportedModelError(
            f"{source} is quantised with {method!r}, which is not read here",
            hint=f"known: awq, {', '.join(QUANTIZERS)}",
        )
    module, package = QUANTIZERS[method]
    if importlib.util.find_spec(module) is None:
        raise UnsupportedModelError(
            f"{source} is quantised with {method}, and {module} is not installed",
            hint=f"pip install {package}, or take the checkpoint that is not quantised",
        )


def _load_tokenizer(source: str | Path, common: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), **common)
    except Exception as e:
        raise TokenizerError(
            f"no usable tokenizer in {source}: {first_line(e)}", hint="tokenizer.json is missing or damaged"
        ) from e
    if len(tokenizer) < MIN_VOCABULARY:
        raise TokenizerError(
            f"the tokenizer of {source} has {len(tokenizer)} tokens", hint="its vocabulary file is missing"
        )
    return tokenizer


def _load_weights(
    source: str | Path, config: Any, *, dtype: torch.dtype | None, device: torch.device, common: dict[str, Any]
) -> Any:
    if quantization_of(config).get("quant_method") == "awq":
        return _load_awq(source, config, dtype or _own_dtype(config, device), device, common)
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype or _own_dtype(config, device), **common}
    if getattr(config, "quantization_config", None) and device.type != "cpu":
        options["device_map"] = {"": str(device)}  # quantised layers cannot be moved afterwards
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(source), config=config, use_safetensors=True, output_loading_info=True, **options
        )
    except ImportError as e:
        raise UnsupportedModelError(f"{source} needs another package: {first_line(e)}") from e
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise CheckpointError(
            f"the weights of {source} cannot be read: {first_line(e)}",
            hint="only complete safetensors checkpoints are read; fetch it again, or convert it to safetensors",
        ) from e
    _check_complete(source, info)
    if dtype is None and device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()
    return model


def _load_awq(
    source: str | Path, config: Any, dtype: torch.dtype | str, device: torch.device, common: dict[str, Any]
) -> Any:
    from kvboost_rag.model.direct.resident import load_resident

    return load_resident(source, config, dtype=_plain_dtype(dtype, device), device=device, **common)


def _load_streamed(
    source: str | Path,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    common: dict[str, Any],
    streaming: Streaming,
) -> Any:
    from kvboost_rag.model.streaming.load import load_streamed

    dtype = _plain_dtype(dtype, device)
    budget, backend = streaming
    return load_streamed(source, config, dtype=dtype, budget=budget, backend=backend, **common)


def _plain_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Where the config does not say: AWQ files are written in float16."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.float32 if device.type == "cpu" else torch.float16


def _own_dtype(config: Any, device: torch.device) -> torch.dtype | str:
    """The dtype that the checkpoint was written in; float16 is several times slower than float32 on a CPU."""
    own = getattr(config, "dtype", None)
    if own is torch.float16 and device.type == "cpu":
        return torch.float32
    return own if isinstance(own, torch.dtype) else "auto"


def _check_complete(source: str | Path, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and a warning; an answer from those is worthless."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} weights, for example {missing[0]}", hint="the download is incomplete"
        )
