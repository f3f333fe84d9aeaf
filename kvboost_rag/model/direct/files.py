"""The tensors of a safetensors checkpoint, found by metadata alone and read once, straight to where they stay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvboost_rag.errors import CheckpointError, ModelNotFoundError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20  # safetensors' own limit
STAGING = 16 << 20  # bytes read at a time where a tensor has to be cast or moved to another device

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies: ``nbytes`` bytes from ``start`` of ``file``."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class CheckpointFiles:
    """The safetensors files of a checkpoint folder. Nothing but headers is read until :meth:`read_into`.

    Raises:
        CheckpointError: a shard is missing, cut short or damaged, or a tensor has a dtype that is not read here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refs: dict[str, TensorRef] = {}
        for file in shards(folder):
            self.refs.update(_read_header(file))

    def __contains__(self, name: object) -> bool:
        return name in self.refs

    def __iter__(self) -> Iterator[str]:
        return iter(self.refs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.refs.values())

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill ``target`` (contiguous, the tensor's shape, any device); casts between floating dtypes on the way."""
        ref = self.refs[name]
        with ref.file.open("rb", buffering=0) as file:
            file.seek(ref.start)
            if target.device.type == "cpu" and target.dtype == ref.dtype:
                _read_exactly(file, _bytes_of(target), ref.file)
            else:
                _read_staged(file, ref, target)


def shards(folder: Path) -> list[Path]:
    """The weight files of ``folder``, in order. Raises CheckpointError where one is not there."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}", hint="only safetensors checkpoints are read")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / str(name) for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise CheckpointError(f"{index} is damaged: {e!r}", hint="fetch it again") from e
    missing = [file.name for file in files if not file.is_file() or file.parent != folder]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files, for example {missing[0]}",
            hint="the download is incomplete; fetch the missing files",
        )
    return files


def local_folder(source: str | Path, *, revision: str | None = None, configs_only: bool = False) -> Path:
    """The folder of a checkpoint; a hub id is fetched (or found in the local hub cache).

    Raises:
        ModelNotFoundError: the hub does not have it, or cannot be asked.
    """
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download

    patterns = ["*.json"] if configs_only else ["*.json", "*.safetensors"]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as e:
        raise ModelNotFoundError(
            f"{source!r} could not be fetched: {str(e).splitlines()[0][:200] if str(e) else type(e).__name__}",
            hint="check the spelling, the network and the access token, or give a local folder",
        ) from e


def _read_header(file: Path) -> dict[str, TensorRef]:
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        return {str(name): _ref(file, 8 + length, size, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file} is damaged or cut short: {e}", hint="fetch it again") from e


def _ref(file: Path, data: int, size: int, entry: dict[str, Any]) -> TensorRef:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{file} holds {entry['dtype']} tensors, which are not read here")
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{shape} of {dtype} in {end - begin} bytes")
    if data + end > size:
        raise ValueError(f"a tensor ends at byte {data + end} of {size}")
    return TensorRef(file, dtype, shape, data + begin, end - begin)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _read_exactly(file: Any, target: memoryview, path: Path) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done : done + (64 << 20)])
        if not count:
            raise CheckpointError(f"{path} ended early", hint="fetch it again")
        done += count


def _read_staged(file: Any, ref: TensorRef, target: torch.Tensor) -> None:
    flat = target.detach().view(-1)
    step = STAGING // ref.dtype.itemsize
    staging = torch.empty(min(step, flat.numel()), dtype=ref.dtype)
    for a in range(0, flat.numel(), step):
        part = staging[: min(step, flat.numel() - a)]
        _read_exactly(file, _bytes_of(part), ref.file)
        flat[a : a + part.numel()].copy_(part)
