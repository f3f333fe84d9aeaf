"""Rotation: what the model itself does, and its exact inverse, at any position and with any scaling."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.adapter import ModelAdapter
from tests.tiny import tiny_model, tiny_tokenizer

POSITIONS = (0, 1, 7, 511, 512, 513, 1023, 1024, 4000)
N = 16


@lru_cache(maxsize=1)
def adapter_of(family: str) -> ModelAdapter:
    return ModelAdapter(tiny_model(family), tiny_tokenizer())


def own_rotation(adapter: ModelAdapter, keys: torch.Tensor, start: int) -> torch.Tensor:
    """Rotated by the model's own modules and its own function: ``keys [Hkv, n, D]``."""
    import importlib

    model = adapter.model
    module = importlib.import_module(type(model).__module__)
    cos, sin = model.model.rotary_emb(keys, torch.arange(start, start + keys.shape[1])[None])
    return module.apply_rotary_pos_emb(keys[None], keys[None], cos, sin)[1][0]  # type: ignore[no-any-return]


def test_rotation_is_the_models_own(family: str) -> None:
    adapter = adapter_of(family)
    keys = torch.randn(2, N, adapter.spec.head_dim)
    placed = torch.empty_like(keys)
    for start in POSITIONS:
        adapter.rope.rotate_into(placed, keys, start)
        assert (placed - own_rotation(adapter, keys, start)).abs().max() < 1e-5, start


def test_unrotate_is_its_inverse(family: str) -> None:
    """YaRN's table carries an attention scaling: its transpose alone would give its square times K."""
    adapter = adapter_of(family)
    keys = torch.randn(2, N, adapter.spec.head_dim)
    again = torch.empty_like(keys)
    for start in POSITIONS:
        placed = own_rotation(adapter, keys, start)
        assert (adapter.rope.unrotate(placed, start) - keys).abs().max() < 1e-5, start
        adapter.rope.rotate_into(again, adapter.rope.unrotate(placed, start), start + 3)
        assert (again - own_rotation(adapter, keys, start + 3)).abs().max() < 1e-5, start


def test_yarn_really_scales() -> None:
    adapter = adapter_of("yarn")
    assert adapter.rope.scaling > 1.05
    keys = torch.randn(2, N, adapter.spec.head_dim)
    placed = own_rotation(adapter, keys, 5)
    without = RopeTable(adapter.rope.compute, scaling=1.0)
    assert (without.unrotate(placed, 5) - keys).abs().max() > 0.1, "a lost scaling would be noticed"


def test_a_lost_scaling_would_be_noticed() -> None:
    """Released code rebuilds the table with ``rope_scaling=None``."""
    for family in ("llama3-scaling", "linear", "yarn"):
        keys = torch.randn(2, N, 16)
        scaled, plain = (own_rotation(adapter_of(f), keys, 600) for f in (family, "llama"))
        assert (scaled - plain).abs().max() > 0.1, family


@pytest.mark.parametrize("family", ["llama", "yarn", "phi3"])
def test_scattered_positions_are_those_of_contiguous_ones(family: str) -> None:
    adapter = adapter_of(family)
    positions = torch.tensor([0, 3, 4, 700, 2000])
    keys = torch.randn(2, 5, adapter.spec.head_dim)
    scattered = adapter.rope.rotate_at(keys, positions)
    for i, p in enumerate(positions.tolist()):
        assert (scattered[:, i : i + 1] - own_rotation(adapter, keys[:, i : i + 1], p)).abs().max() < 1e-5
    assert (adapter.rope.unrotate_at(scattered, positions) - keys).abs().max() < 1e-5


def test_partial_rotary_leaves_the_rest_alone() -> None:
    adapter = adapter_of("phi3")
    keys = torch.randn(2, N, 16)
    placed = torch.empty_like(keys)
    adapter.rope.rotate_into(placed, keys, 100)
    assert torch.equal(placed[..., 8:], keys[..., 8:])
    assert not torch.allclose(placed[..., :8], keys[..., :8])


@pytest.mark.parametrize("family", ["llama", "yarn", "phi3"])
def test_half_precision_rounds_once(family: str) -> None:
    adapter = adapter_of(family)
    keys = torch.randn(2, N, 16).bfloat16()
    placed, exact = torch.empty_like(keys), torch.empty(2, N, 16)
    adapter.rope.rotate_into(placed, keys, 3000)
    adapter.rope.rotate_into(exact, keys.float(), 3000)
    assert torch.equal(placed, exact.bfloat16()), "computed in fp32, cast once"
    assert (adapter.rope.unrotate(placed, 3000).float() - keys.float()).abs().max() < 0.04


def test_a_view_of_a_cache_may_be_the_target() -> None:
    adapter = adapter_of("llama")
    keys = torch.randn(3, 2, N, 16)
    cache = torch.full((3, 2, 2, 50, 16), 7.0)
    adapter.rope.rotate_into(cache[:, 0, :, 10 : 10 + N], keys, 10)
    for layer in range(3):
        assert (cache[layer, 0, :, 10 : 10 + N] - own_rotation(adapter, keys[layer], 10)).abs().max() < 1e-5
    assert (cache[:, 1] == 7).all()
    assert (cache[:, 0, :, :10] == 7).all()


def test_the_table_never_asks_beyond_its_limit() -> None:
    """A longrope model would switch to another table."""
    asked = []

    def compute(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(int(position_ids.max()) + 1)
        angles = position_ids[0, :, None].float().expand(-1, 4)
        return angles.cos()[None], angles.sin()[None]

    table = RopeTable(compute, limit=512)
    for start in (0, 100, 512 - N):
        table.unrotate(torch.randn(1, N, 4), start)
    assert max(asked) <= 512


def test_longrope_inside_its_original_length() -> None:
    adapter = adapter_of("longrope")
    keys = torch.randn(2, N, 16)
    placed = own_rotation(adapter, keys, 400)
    assert (adapter.rope.unrotate(placed, 400) - keys).abs().max() < 1e-5
