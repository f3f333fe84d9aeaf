"""A model without weights: built on the meta device, packed layers put in, every weight checked against the files."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvboost_rag.errors import CheckpointError, UnsupportedModelError
from kvboost_rag.model.awq.format import AwqFormat, quantization_of
from kvboost_rag.model.awq.linear import AwqLinear
from kvboost_rag.model.direct.files import CheckpointFiles
from kvboost_rag.model.direct.layout import weights
from kvboost_rag.plan.weights import is_listed

# Derived from the config; older checkpoints carry them all the same.
IGNORED = (r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$")


@dataclass(slots=True)
class Skeleton:
    """A meta model and the checkpoint's name for each of its weights (``sources``; tied weights stand there once)."""

    model: Any
    files: CheckpointFiles
    sources: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # name → the name that it shares its weight with

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.get_submodule(self.layers_path)  # type: ignore[no-any-return]

    @property
    def layers_path(self) -> str:
        """Where the decoder layers are, for example ``model.layers``."""
        count = int(self.model.config.num_hidden_layers)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return str(name)
        raise UnsupportedModelError(
            f"no list of {count} decoder layers in {type(self.model).__name__}", hint="load it without vram="
        )


def build_skeleton(
    config: Any, files: CheckpointFiles, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Skeleton:
    """The model of ``config`` on the meta device in ``dtype``, its weights matched with ``files``.

    Raises:
        CheckpointError: weights are missing, left over, of a wrong shape or dtype; or the quantisation is not read.
    """
    quantization = quantization_of(config)
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=dtype, trust_remote_code=trust_remote_code)
    model.eval().requires_grad_(False)
    if quantization:
        awq = AwqFormat.parse(files.folder, quantization)
        put_awq_layers(model, files, awq, dtype)
        model.config.quantization_config = awq.as_dict()
    model.tie_weights()
    return match(Skeleton(model, files))


def put_awq_layers(model: nn.Module, files: CheckpointFiles, awq: AwqFormat, dtype: torch.dtype) -> None:
    """Replace each linear layer that the files hold packed. What is packed is told by the files; the config's
    ``modules_to_not_convert`` must not contradict them."""
    packed = [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]
    if not packed:
        raise CheckpointError(
            f"{files.folder} says that it is AWQ but holds no packed weight", hint="config.json and weights don't match"
        )
    for name in packed:
        if is_listed(name, awq.not_converted):
            raise CheckpointError(f"{name} is packed although modules_to_not_convert lists it")
        try:
            linear = model.get_submodule(name)
        except AttributeError:
            continue  # reported as a left-over tensor by match()
        if not isinstance(linear, nn.Linear):
            raise CheckpointError(f"{name} is packed, but a {type(linear).__name__} in this model")
        scales = files.refs.get(f"{name}.scales")
        parent, _, attribute = name.rpartition(".")
        layer = AwqLinear(
            linear.in_features, linear.out_features, awq.group_size, bias=linear.bias is not None, dtype=dtype,
            scale_dtype=scales.dtype if scales else torch.float16, device="meta", name=name,
        )  # fmt: skip
        setattr(model.get_submodule(parent), attribute, layer)


def match(skeleton: Skeleton) -> Skeleton:
    """Find the source of each weight. Nothing is ever filled in for one that is not there."""
    files, model = skeleton.files, skeleton.model
    first: dict[int, str] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in weights(model, duplicates=True):
        if id(tensor) in first:
            skeleton.tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            wanted[name] = tensor
    for name in wanted:
        names = [name, *(n for n, shared in skeleton.tied.items() if shared == name)]
        found = [n for n in names if n in files]
        if found:
            skeleton.sources[name] = found[0]
    _check_complete(skeleton, set(wanted))
    for name, source in skeleton.sources.items():
        _check_fit(files, source, wanted[name])
    return skeleton


def _check_complete(skeleton: Skeleton, wanted: set[str]) -> None:
    folder = skeleton.files.folder
    missing = sorted(wanted - set(skeleton.sources))
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights, for example {missing[0]}", hint="the download is incomplete"
        )
    patterns = [*IGNORED, *(getattr(skeleton.model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    known = {*skeleton.sources.values(), *skeleton.tied}
    extra = sorted(n for n in skeleton.files if n not in known and not any(re.search(p, n) for p in patterns))
    if extra:
        raise CheckpointError(
            f"{folder} holds {len(extra)} weights that the model has no place for, for example {extra[0]}",
            hint="config.json does not belong to these weights",
        )


def _check_fit(files: CheckpointFiles, source: str, wanted: torch.Tensor) -> None:
    ref = files.refs[source]
    if ref.shape != tuple(wanted.shape):
        raise CheckpointError(
            f"{source} has the shape {list(ref.shape)}, the model needs {list(wanted.shape)}",
            hint="config.json (group_size among it) does not belong to these weights",
        )
    if ref.dtype != wanted.dtype and not (ref.dtype.is_floating_point and wanted.dtype.is_floating_point):
        raise CheckpointError(f"{source} is {ref.dtype}, the model needs {wanted.dtype}")


def rebuild_buffers(model: nn.Module, config: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables): each such module is made anew on ``device``.

    Raises:
        UnsupportedModelError: a module that cannot be made from the config alone.
    """
    for name, module in list(model.named_modules()):
        derived = module._non_persistent_buffers_set
        if not any(b.is_meta for n, b in module._buffers.items() if n in derived and b is not None):
            continue
        try:
            with torch.device(device):
                fresh = type(module)(config=config)
        except TypeError as e:
            raise UnsupportedModelError(
                f"the buffers of {name} ({type(module).__name__}) cannot be computed from the config: {e}",
                hint="load the checkpoint that is not quantised, without vram=",
            ) from e
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, fresh.eval())
