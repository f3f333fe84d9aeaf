"""Load a whole checkpoint to one device: one blob per layer, no second copy of the weights at any time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.direct.files import CheckpointFiles, local_folder
from kvboost_rag.model.direct.layout import Layout, set_weight, weights
from kvboost_rag.model.direct.skeleton import Skeleton, build_skeleton, rebuild_buffers


def load_resident(
    source: str | Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
    files: CheckpointFiles | None = None,
) -> Any:
    """The model of a plain or AWQ checkpoint, ready on ``device``.

    Peak memory is the model plus one staging buffer of 16 MiB. Dense weights are cast to ``dtype``; packed ones and
    their scales stay as they are. ``files`` replaces what would be found at ``source``.

    Raises:
        CheckpointError: damaged, incomplete, or of another format. CapacityError: it does not fit the device.
    """
    files = files or CheckpointFiles(local_folder(source, revision=revision))
    skeleton = build_skeleton(config, files, dtype, trust_remote_code=trust_remote_code)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for path, layer in layer_paths(skeleton):
                layout = Layout.of(layer)
                fill(skeleton, path, layer, layout, torch.empty(layout.nbytes, dtype=torch.uint8, device=device))
            fill_rest(skeleton, device)
            rebuild_buffers(skeleton.model, skeleton.model.config, device)
    except torch.OutOfMemoryError as e:
        raise CapacityError(
            f"the weights of {source} ({files.nbytes / 2**30:.1f} GiB) do not fit on {device}",
            hint='vram="8GiB" streams the layers that do not fit from host memory',
        ) from e
    finish(skeleton.model, source, revision)
    return skeleton.model


def layer_paths(skeleton: Skeleton) -> list[tuple[str, torch.nn.Module]]:
    """Each decoder layer with its path."""
    path = skeleton.layers_path
    return [(f"{path}.{i}", layer) for i, layer in enumerate(skeleton.layers)]


def fill(skeleton: Skeleton, path: str, module: torch.nn.Module, layout: Layout, blob: torch.Tensor) -> None:
    """Read the weights of ``module`` into ``blob`` and bind them there."""
    read_blob(skeleton, path, layout, blob)
    layout.bind(module, blob)


def read_blob(skeleton: Skeleton, path: str, layout: Layout, blob: torch.Tensor) -> None:
    """Read the weights below ``path`` into ``blob``."""
    for name, view in layout.views(blob).items():
        skeleton.files.read_into(skeleton.sources[f"{path}.{name}"], view)


def fill_rest(skeleton: Skeleton, device: torch.device, skip: frozenset[str] = frozenset()) -> None:
    """Read what is still on the meta device to ``device``, then tie what is tied; ``skip`` names weights left out."""
    model = skeleton.model
    for name, tensor in list(weights(model)):
        if tensor.is_meta and name not in skip:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            skeleton.files.read_into(skeleton.sources[name], target)
            set_weight(model, name, target)
    for name, shared in skeleton.tied.items():
        if shared not in skip:
            owner, _, attribute = shared.rpartition(".")
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._parameters[own] = model.get_submodule(owner)._parameters[attribute]


def finish(model: Any, source: str | Path, revision: str | None) -> None:
    """What ``from_pretrained`` of transformers would also have set."""
    from transformers import GenerationConfig

    model.config._name_or_path = str(source)
    model.eval().requires_grad_(False)
    with contextlib.suppress(OSError):  # the checkpoint has none: what the config says stays
        model.generation_config = GenerationConfig.from_pretrained(str(source), revision=revision)
