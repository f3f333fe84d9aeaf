"""Laying blocks: in pieces that a planned workspace can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag.engine import compose
from kvboost_rag.kv.rope import RopeTable
from tests.engine.helpers import DOCS, chat, make_engine, prepared
from tests.tiny import LAYERS


@pytest.mark.parametrize("layers_at_a_time", [1, 3, LAYERS])
def test_pieces_give_the_same_bits(layers_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(prefix_bytes=0)
    engine.warm(DOCS)
    want, _ = prepared(engine, chat(), repair="fast")
    largest = max((c.end - c.start) for c in want.prompt.chunks) * engine.adapter.spec.bytes_per_token // LAYERS
    turned: list[int] = []
    rotate = RopeTable.rotate_into

    def spy(self: RopeTable, out: torch.Tensor, keys: torch.Tensor, start: int) -> Any:
        turned.append(2 * keys.numel() * keys.element_size())
        return rotate(self, out, keys, start)

    monkeypatch.setattr(compose, "PIECE", layers_at_a_time * largest)
    monkeypatch.setattr(RopeTable, "rotate_into", spy)
    got, report = prepared(engine, chat(), repair="fast")
    assert report.hits == len(DOCS)
    assert torch.equal(got.logits, want.logits)
    assert max(turned) <= layers_at_a_time * largest
    assert sum(turned) == sum(c.end - c.start for c in want.prompt.chunks) * engine.adapter.spec.bytes_per_token
