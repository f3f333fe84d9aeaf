"""A block never serves another computation: one test per field of the fingerprint and the key, through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, fingerprint
from kvboost_rag.store import MemoryStore
from tests.engine.helpers import DOCS, TOLERANCE, chat, full_prefill_gap, make_engine, prepared
from tests.tiny import tiny_model, tiny_tokenizer

ROPE_8 = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
THETA = {"rope_type": "default", "rope_theta": 500_000.0}


def tokenizer_with_another_merge() -> Any:
    """Same size, other rules: ids mean other text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["qqqq"])
    return tokenizer


def one_weight_scaled() -> Any:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1.0001)
    return model


def with_peft_config() -> Any:
    model = tiny_model()
    model.peft_config = {"tone": object()}
    model.active_adapters = lambda: ["tone"]
    return model


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weights": lambda: {"model": tiny_model(seed=1)},
    "one matrix": lambda: {"model": one_weight_scaled()},
    "dtype": lambda: {"model": tiny_model(dtype=torch.bfloat16)},
    "rope scaling": lambda: {"model": tiny_model(rope_parameters=ROPE_8)},
    "rope theta": lambda: {"model": tiny_model(rope_parameters=THETA)},
    "architecture": lambda: {"model": tiny_model("qwen3")},
    "norm epsilon": lambda: {"model": tiny_model(rms_norm_eps=1e-3)},
    "adapter": lambda: {"model": with_peft_config()},
    "tokenizer": lambda: {"tokenizer": tokenizer_with_another_merge(), "model": tiny_model()},
    "salt": lambda: {"salt": "tenant-b"},
    "filler": lambda: {"filler": "Quite another prose that goes on for a while about nothing at all. " * 20},
    "filler length": lambda: {"filler_tokens": 20},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_computation_never_gets_these_blocks(what: str) -> None:
    store = MemoryStore()
    make_engine(store=store).warm(DOCS)
    other = make_engine(store=store, **OTHERS[what]())
    _, report = prepared(other, chat(), chunks=DOCS)
    assert [c.outcome for c in report.chunks] == ["miss"] * 4
    before = set(store.keys())
    other.generate(chat(), chunks=DOCS, max_new_tokens=1)
    assert len(set(store.keys()) - before) == 4, "and stores its own beside them"
    assert [c.outcome for c in prepared(make_engine(store=store), chat())[1].chunks] == ["hit"] * 4


def test_the_same_computation_does() -> None:
    store = MemoryStore()
    make_engine(store=store).warm(DOCS)
    assert prepared(make_engine(store=store), chat())[1].hits == 4


@pytest.mark.parametrize("constant", ["FORMAT"])
def test_another_format_of_the_fingerprint(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    make_engine(store=store).warm(DOCS)
    monkeypatch.setattr(fingerprint, constant, "fp999")
    assert prepared(make_engine(store=store), chat(), chunks=DOCS)[1].hits == 0


def test_the_attention_implementation_does_not_participate() -> None:
    """A warm-up on a GPU must serve a CPU."""
    store = MemoryStore()
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    make_engine(store=store, model=eager).warm(DOCS)
    assert {store.get(k).header.attention for k in list(store.keys())} == {"eager"}
    assert prepared(make_engine(store=store), chat())[1].hits == 4


def test_a_salted_text_is_not_even_found() -> None:
    """Without naming the chunk, another tenant's prompt shows no sign that somebody stored it."""
    store = MemoryStore()
    make_engine(store=store, salt="a").warm(DOCS)
    assert prepared(make_engine(store=store, salt="b"), chat())[1].chunks == []
    assert prepared(make_engine(store=store, salt="a"), chat())[1].hits == 4


# -- adapters that come and go ---------------------------------------------------------------------------------------


class FakeAdapter:
    """Switches a model the way PEFT does: the active names change, and with them what the layers compute."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = ["default"]
        model.peft_config = {"default": object(), "loud": object()}
        model.active_adapters = lambda: self.names
        for layer in model.model.layers:
            layer.self_attn.v_proj.register_forward_hook(self._scale)

    def _scale(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2.0 if self.names == ["loud"] else out

    @contextmanager
    def loud(self) -> Iterator[None]:
        self.names = ["loud"]
        try:
            yield
        finally:
            self.names = ["default"]


def _loud_reference() -> Any:
    model = tiny_model()
    FakeAdapter(model).names[:] = ["loud"]
    return model


def test_switching_an_adapter_switches_blocks_contexts_and_prefixes() -> None:
    engine = make_engine()
    adapter = FakeAdapter(engine.adapter.model)
    engine.warm(DOCS, head=chat()[0]["content"])
    quiet = engine.generate(chat(), max_new_tokens=6, repair="fast")
    assert quiet.report.hits == 4
    with adapter.loud():
        first = engine.generate(chat(), chunks=DOCS, max_new_tokens=6)
        assert first.report.hits == 0
        assert first.report.prefix_tokens == 0
        assert first.report.stored_tokens > 0
        _, report = prepared(engine, chat(), repair="fast")
        assert report.prefix_exact, "its own prefix now"
    again = engine.generate(chat(), max_new_tokens=6, repair="fast")
    assert again.report.hits == 4
    assert again.token_ids == quiet.token_ids


def test_blocks_stored_under_an_adapter_were_computed_after_its_own_context() -> None:
    """The context's KV is kept between warm-ups: it must not outlive the adapter that computed it."""
    engine = make_engine()
    adapter = FakeAdapter(engine.adapter.model)
    engine.generate(chat(DOCS[:1]), chunks=DOCS[:1], max_new_tokens=1)  # computes the context
    with adapter.loud():
        engine.generate(chat(DOCS[1:2]), chunks=DOCS[1:2], max_new_tokens=1)
        stored = engine.store.get(engine.encoder().key(engine.encoder().tokenize(DOCS[1])))
    fresh = make_engine()
    with FakeAdapter(fresh.adapter.model).loud():
        expected = fresh.encoder().encode([fresh.encoder().tokenize(DOCS[1])])[0]
    assert (stored.kv - expected.kv).abs().max() < TOLERANCE


def test_full_repair_is_exact_under_an_adapter() -> None:
    from kvboost_rag import Repair

    engine = make_engine()
    with FakeAdapter(engine.adapter.model).loud():
        engine.warm(DOCS)
        gap = full_prefill_gap(engine, _loud_reference(), chat(), repair=Repair.full())
    assert gap < TOLERANCE


def test_two_engines_over_one_loaded_model() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    first = KVBoost(model, tokenizer, store="memory", filler_tokens=48)
    second = KVBoost(model, tokenizer, store="memory", filler_tokens=48, repair="fast")
    first.warm(DOCS)
    second.warm(DOCS)
    alone = make_engine(repair="fast")
    alone.warm(DOCS)
    first.generate(chat(), max_new_tokens=4)
    assert second.generate(chat(), max_new_tokens=8).token_ids == alone.generate(chat(), max_new_tokens=8).token_ids
