"""Shared engines: one loaded model per process, released with its last holder."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import KVBoost, SharedEngine
from kvboost_rag.errors import ModelNotFoundError
from tests.tiny import save_tiny


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Iterator[str]:
    yield str(save_tiny(tmp_path / "model", tokenizer=tokenizer))
    gc.collect()


def test_equal_requests_are_one_engine(folder: str, tmp_path: Path) -> None:
    first = SharedEngine(folder, store=tmp_path / "kv", filler_tokens=16)
    assert not first.loaded
    engine = first.get()
    again = SharedEngine(folder, store=str(tmp_path / "model" / ".." / "kv"), filler_tokens=16)
    assert again.loaded
    assert again.get() is engine


@pytest.mark.parametrize(
    "other", [{"store": None}, {"filler_tokens": 8}, {"salt": "tenant"}], ids=lambda other: next(iter(other))
)
def test_other_engines_over_the_same_weights_share_them(other: dict[str, Any], folder: str) -> None:
    first = SharedEngine(folder, store="memory", filler_tokens=16)
    second = SharedEngine(folder, **{"store": "memory", "filler_tokens": 16, **other})
    assert second.get() is not first.get()
    assert second.get().adapter.model is first.get().adapter.model
    assert second.get().adapter.lock is first.get().adapter.lock, "one forward at a time"


def test_another_dtype_is_another_model(folder: str) -> None:
    first = SharedEngine(folder, store=None, dtype="float32")
    second = SharedEngine(folder, store=None, dtype="bfloat16")
    assert first.get().adapter.model is not second.get().adapter.model


def test_copies_are_itself_and_a_pickle_carries_the_request(folder: str) -> None:
    shared = SharedEngine(folder, store="memory")
    engine = shared.get()
    assert copy.copy(shared) is copy.deepcopy(shared) is shared
    data = pickle.dumps(shared)
    assert len(data) < 2000
    assert pickle.loads(data).get() is engine


def test_the_last_holder_frees_the_model(folder: str) -> None:
    shared, other = SharedEngine(folder, store="memory"), SharedEngine(folder, store=None)
    model = weakref.ref(shared.get().adapter.model)
    other.get()
    del shared
    gc.collect()
    assert model() is not None
    del other
    gc.collect()
    assert model() is None


def test_an_adopted_engine_is_found_while_it_lives(tiny: Any, tokenizer: Any) -> None:
    engine = KVBoost(tiny, tokenizer, store="memory", filler_tokens=16)
    data = pickle.dumps(SharedEngine.of(engine))
    assert pickle.loads(data).get() is engine
    engine.close()
    del engine
    gc.collect()
    with pytest.raises(ModelNotFoundError, match="handed over"):
        pickle.loads(data).get()
