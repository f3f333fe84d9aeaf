"""Read a ``.gguf`` file once, keep the result.

transformers dequantises a GGUF file on every load (16 s for the small default model, 4 s more for its tokenizer). The
result is kept as a safetensors folder under ``$KVBOOST_CACHE/models`` (default ``~/.cache/kvboost-rag/models``), named
by the digest of the file's content, so that a changed file never meets an old conversion. A folder appears by rename,
complete or not at all; a damaged one is thrown away and made anew.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from kvboost_rag.errors import CheckpointError, KVBoostError, MissingExtraError, TokenizerError, UnsupportedModelError
from kvboost_rag.model.checkpoint import first_line, load_checkpoint

logger = logging.getLogger(__name__)

CONVERSION_FORMAT = 1
_CPU = torch.device("cpu")
# Tokens that end a turn in the chat templates of common families.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def cache_root() -> Path:
    """``$KVBOOST_CACHE``, or ``~/.cache/kvboost-rag``."""
    configured = os.environ.get("KVBOOST_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvboost-rag"


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Model on the CPU, tokenizer, and digest of the file (16 hex digits).

    Raises CheckpointError (not a GGUF file, or damaged), UnsupportedModelError (an architecture that transformers
    cannot read from GGUF), MissingExtraError. A cache that cannot be written is a warning.
    """
    digest = _digest(path)
    folder = cache_root() / "models" / _folder_name(path, digest, dtype)
    if folder.is_dir():
        try:
            return (*load_checkpoint(folder, dtype=dtype, device=_CPU), digest)
        except KVBoostError as e:
            logger.warning("the kept conversion %s is damaged and is made anew: %s", folder, e)
            shutil.rmtree(folder, ignore_errors=True)
    logger.info("converting %s (once; kept in %s)", path, folder)
    model, tokenizer = _convert(path, dtype)
    if not _keep(model, tokenizer, folder):
        return model, tokenizer, digest
    del model  # what was just written is what later processes read: use the same
    gc.collect()
    return (*load_checkpoint(folder, dtype=dtype, device=_CPU), digest)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file", hint="it does not begin with the GGUF magic bytes")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {first_line(e)}") from e


def _folder_name(path: Path, digest: str, dtype: torch.dtype) -> str:
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    return f"{path.stem}-{digest}-{str(dtype).removeprefix('torch.')}-f{CONVERSION_FORMAT}-tf{version}"


def _convert(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Dequantise with transformers, and mend what its conversion leaves out."""
    import transformers

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    options: dict[str, Any] = {"dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # else 5.24 may keep the weights packed, and refuses to save them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise _conversion_error(path, e) from e
    _mend_tokenizer(path, tokenizer)
    _mend_eos(model, tokenizer)
    return model, tokenizer


def _conversion_error(path: Path, error: Exception) -> KVBoostError:
    if isinstance(error, ImportError) or "pip install" in str(error):
        return MissingExtraError(
            f"{path} needs another package: {first_line(error)}", hint="pip install gguf accelerate"
        )
    if "not supported" in str(error) or "architecture" in str(error):
        return UnsupportedModelError(
            f"{path}: {first_line(error)}", hint="take the model's safetensors checkpoint instead"
        )
    return CheckpointError(f"{path} cannot be read: {first_line(error)}", hint="the download may be incomplete")


def _mend_tokenizer(path: Path, tokenizer: Any) -> None:
    """Take from the file what some releases of transformers read wrongly or not at all."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    fields = GGUFReader(str(path)).fields
    for attribute, key in _SPECIAL_TOKENS.items():
        if f"tokenizer.ggml.{key}" in fields:  # 5.17 takes the BOS for the EOS
            token = tokenizer.convert_ids_to_tokens(int(fields[f"tokenizer.ggml.{key}"].contents()))
            if token is not None and getattr(tokenizer, attribute) != token:
                setattr(tokenizer, attribute, token)
    pre = fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        # SmolLM splits off every digit first; the conversion keeps only the byte-level half of its pre-tokenizer.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _mend_eos(model: Any, tokenizer: Any) -> None:
    """A GGUF file names one end token; make sure that the token which ends a turn in its template is among them."""
    template = tokenizer.chat_template or ""
    declared = model.generation_config.eos_token_id
    ids = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    ids.append(tokenizer.eos_token_id)
    ids += [tokenizer.convert_tokens_to_ids(t) for t in _END_OF_TURN if t in template and t in tokenizer.get_vocab()]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    if not ids:
        raise TokenizerError("neither the model nor its tokenizer names an end token")
    model.generation_config.eos_token_id = ids


def _keep(model: Any, tokenizer: Any, folder: Path) -> bool:
    """Write the folder by rename. False, with a warning, where that is not possible: the model is there anyway."""
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if not folder.exists():  # another process may have been faster
            temporary.rename(folder)
        return True
    except Exception as e:  # a full disk is an OSError or a SafetensorError, by who notices it first
        if folder.is_dir():
            return True
        warnings.warn(
            f"the converted model cannot be kept in {folder.parent}, so every load converts it again: {first_line(e)}. "
            "Set KVBOOST_CACHE to a folder that can be written.",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
