"""Load a plain or AWQ checkpoint under a budget of GPU memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvboost_rag.errors import CapacityError, UnsupportedModelError, UsageError
from kvboost_rag.model.direct.files import CheckpointFiles, local_folder
from kvboost_rag.model.direct.layout import Layout, aligned, weights
from kvboost_rag.model.direct.resident import fill, fill_rest, finish, layer_paths, read_blob
from kvboost_rag.model.direct.skeleton import Skeleton, build_skeleton, rebuild_buffers
from kvboost_rag.model.rows import slice_mlps
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.model.streaming.host import HostEmbedding, HostLinear
from kvboost_rag.model.streaming.slab import HostSlab
from kvboost_rag.model.streaming.streamer import LayerStreamer
from kvboost_rag.plan import Budget, Plan, Weights, available_host_memory, make_plan, parse_bytes, row_bytes

logger = logging.getLogger(__name__)

AUTO_RESERVE = 250_000_000  # beside what the driver and the display have taken already


def choose_backend(device: torch.device, backend: Backend | None) -> Backend:
    """The backend for ``device``. Raises UsageError where there is nothing to stream to."""
    if backend is not None:
        return backend
    if device.type != "cuda":
        raise UsageError(
            f"vram= is for a CUDA device, this is {device.type}", hint="leave vram out: weights stay in host memory"
        )
    from kvboost_rag.model.streaming.cuda import CudaBackend

    return CudaBackend(device)


def resolve_budget(vram: str | int | Budget, backend: Backend) -> Budget:
    """``"auto"`` (what is free), a size, or a whole :class:`Budget`. Raises UsageError, CapacityError."""
    if isinstance(vram, Budget):
        budget = vram
    elif vram == "auto":
        memory = backend.memory()
        if memory is None:
            raise UsageError('vram="auto" needs a device that tells its memory', hint="give a size such as 8GiB")
        budget = Budget(vram=memory[0], reserve=AUTO_RESERVE)
    else:
        budget = Budget(vram=parse_bytes(vram))
    return budget if budget.host is not None else replace(budget, host=available_host_memory())


def load_streamed(
    source: str | Path,
    config: Any,
    *,
    dtype: torch.dtype,
    budget: Budget,
    backend: Backend,
    revision: str | None = None,
    trust_remote_code: bool = False,
    files: CheckpointFiles | None = None,
) -> Any:
    """The model, its streamed layers in host memory. ``model.kvboost_plan`` tells what lies where.
    ``files`` replaces what would be found at ``source``.

    Raises:
        CheckpointError: damaged, incomplete, or of another format.
        CapacityError: the budget or host memory is too small; both are told before any weight is read.
    """
    files = files or CheckpointFiles(local_folder(source, revision=revision))
    skeleton = build_skeleton(config, files, dtype, trust_remote_code=trust_remote_code)
    plan = make_plan(measure(skeleton, str(source)), budget)
    _check_device(plan, backend)
    with torch.inference_mode(False), torch.no_grad():
        _place_layers(skeleton, plan, backend)
        skip = _place_tables(skeleton, plan, backend)
        fill_rest(skeleton, backend.device, skip)
        rebuild_buffers(skeleton.model, skeleton.model.config, backend.device)
    finish(skeleton.model, source, revision)
    skeleton.model.kvboost_plan = plan
    if plan.mlp_rows is not None:
        slice_mlps(skeleton.model, plan.mlp_rows)
    _start(skeleton.model, plan)
    return skeleton.model


def measure(skeleton: Skeleton, name: str) -> Weights:
    """The real sizes of a model's parts."""
    model = skeleton.model
    embed, head = _table(model.get_input_embeddings()), _table(model.get_output_embeddings())
    config = model.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = tuple(Layout.of(layer).nbytes for layer in skeleton.layers)
    inside = {id(t) for layer in skeleton.layers for _, t in weights(layer)}
    tables = {id(embed), id(head)}
    return Weights(
        layers=layers,
        embed=_nbytes(embed),
        head=_nbytes(head),
        rest=sum(aligned(_nbytes(t)) for _, t in weights(model) if id(t) not in inside | tables),
        kv_per_token=len(layers) * 2 * kv_heads * dim * model.dtype.itemsize,
        tied=embed is head,
        name=name,
        **row_bytes(int(config.hidden_size), int(config.intermediate_size), heads * dim, model.dtype.itemsize),
    )


def _table(module: Any) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or getattr(module, "bias", None) is not None:
        raise UnsupportedModelError(
            f"a {type(module).__name__} as embedding or output matrix cannot be placed", hint="load it without vram="
        )
    return weight


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check_device(plan: Plan, backend: Backend) -> None:
    """A budget larger than what is free would fail later, in the middle of a request."""
    memory = backend.memory()
    needed = plan.device_bytes - plan.budget.reserve  # the driver has taken its share already
    if memory is not None and needed > memory[0]:
        raise CapacityError(
            f"the plan takes {needed / 2**30:.2f} GiB of {backend.device}, {memory[0] / 2**30:.2f} GiB are free",
            hint="give a smaller vram=, or close what else runs on the GPU",
        )


def _place_layers(skeleton: Skeleton, plan: Plan, backend: Backend) -> None:
    """Resident layers to the device, streamed ones to host memory; each byte is read once, to where it stays."""
    paths = layer_paths(skeleton)
    for i in plan.resident:
        path, layer = paths[i]
        layout = Layout.of(layer)
        fill(skeleton, path, layer, layout, backend.empty(layout.nbytes))
    host: dict[str, torch.Tensor] = {}
    layouts = [Layout.of(paths[i][1]) for i in plan.streamed]
    slab = HostSlab(backend, [layout.nbytes for layout in layouts])
    for i, layout, block in zip(plan.streamed, layouts, slab.blocks, strict=True):
        path = paths[i][0]
        read_blob(skeleton, path, layout, block)
        host.update({f"{path}.{name}": view for name, view in layout.views(block).items()})
    model = skeleton.model
    model.kvboost_host_weights = host
    model.kvboost_streamer = None
    if plan.streamed:
        model.kvboost_streamer = LayerStreamer(
            backend, [paths[i][1] for i in plan.streamed], layouts, slab,
            slots=plan.slots, resident_layers=len(plan.resident),
        )  # fmt: skip


def _place_tables(skeleton: Skeleton, plan: Plan, backend: Backend) -> frozenset[str]:
    """Put embedding and output matrix into host memory where the plan says so; returns the weights dealt with."""
    model = skeleton.model
    dealt: set[str] = set()
    if plan.embed_on_host:
        name = _path(model, model.get_input_embeddings())
        table = _read(skeleton, f"{name}.weight")
        _replace(model, name, HostEmbedding(table, backend.device))
        dealt.add(f"{name}.weight")
        if plan.head_on_host and plan.weights.tied:
            _replace(model, _path(model, model.get_output_embeddings()), HostLinear(table))
    if plan.head_on_host and not plan.weights.tied:
        name = _path(model, model.get_output_embeddings())
        _replace(model, name, HostLinear(_read(skeleton, f"{name}.weight")))
        dealt.add(f"{name}.weight")
    return frozenset(dealt)


def _read(skeleton: Skeleton, name: str) -> torch.Tensor:
    like = skeleton.model.get_parameter(name)
    table = torch.empty(like.shape, dtype=like.dtype)
    skeleton.files.read_into(skeleton.sources[name], table)
    skeleton.model.kvboost_host_weights[name] = table
    return table


def _path(model: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, found in model.named_modules() if found is module))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _start(model: Any, plan: Plan) -> None:
    """Say what was decided and what to expect, then fill the slots."""
    logger.info("%d layers resident, %d streamed through %d slots", len(plan.resident), len(plan.streamed), plan.slots)
    if model.kvboost_streamer is None:
        return
    rate = model.kvboost_streamer.probe()
    if rate is not None:
        expected = plan.tokens_per_s(rate)
        logger.info("host to device: %.1f GB/s measured; at most %.2f tokens/s at batch 1", rate / 1e9, expected or 0.0)
    model.kvboost_streamer.start()
