"""The facade: names, defaults, and the small calls around an answer."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvboost_rag
from kvboost_rag import KVBoost, Repair, Result, errors
from kvboost_rag.store import MemoryStore
from tests.engine.helpers import DOCS, chat, make_engine, prepared
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


def test_names_that_others_build_on() -> None:
    for name in (
        "KVBoost",
        "Repair",
        "Result",
        "Report",
        "Piece",
        "Score",
        "CancelToken",
        "WarmReport",
        "KVBoostError",
    ):
        assert name in kvboost_rag.__all__
        assert getattr(kvboost_rag, name) is not None
    for name in kvboost_rag.__all__:
        assert name in dir(kvboost_rag)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvboost_rag.nothing  # noqa: B018


def test_defaults() -> None:
    parameters = inspect.signature(KVBoost.__init__).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert (defaults["reuse"], defaults["repair"]) == ("chunks", "balanced")
    assert defaults["store"] == "~/.cache/kvboost-rag"
    trust = inspect.signature(KVBoost.from_pretrained).parameters["trust_remote_code"]
    assert trust.default is False


def test_the_readme_lines_work(tmp_path: Path) -> None:
    """``KVBoost.from_pretrained(MODEL_ID)`` with nothing else: in 0.9.0 a TypeError."""
    folder = save_tiny(tmp_path / "model")
    with KVBoost.from_pretrained(folder, store=tmp_path / "store", dtype="float32", device="cpu") as engine:
        assert engine.warm(DOCS).stored == 4
        result = engine.generate(chat([DOCS[2], DOCS[0]]), max_new_tokens=6)
        assert isinstance(result, Result)
        assert result.report.hits == 2
        assert engine.warm(DOCS).skipped == 4


def test_a_wrong_option_at_loading_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    with pytest.raises(TypeError, match="chunk_size"):
        KVBoost.from_pretrained(folder, store=None, chunk_size=128)


def test_warmed_text_hits_at_any_length_but_empty() -> None:
    """0.9.0 cached nothing below 128 tokens, and its own check of correctness was too short to reuse anything."""
    engine = make_engine()
    for text in (DOCS[0][:32], DOCS[1], " ".join(DOCS), " ".join(DOCS * 4)):
        assert engine.warm([text]).stored == 1
        assert prepared(engine, f"Read this.\n{text}\nWhat is it?")[1].hits == 1
    assert engine.warm(["", "   "]).stored == 0


def test_a_chunk_below_the_anchor_length_hits_when_named() -> None:
    engine = make_engine()
    engine.warm(["A short one."])
    _, report = prepared(engine, "So: A short one. Why?", chunks=["A short one."])
    assert report.hits == 1


def test_chunks_longer_than_the_window_are_listed_and_the_rest_is_done() -> None:
    engine = make_engine()
    report = engine.warm(["x y " * 5000, DOCS[0]])
    assert report.stored == 1
    assert len(report.problems) == 1


def test_plan_stores_nothing() -> None:
    engine = make_engine()
    plan = engine.plan_warm(DOCS)
    assert list(engine.store.keys()) == []
    assert plan.chunks == 4


def test_kept_text_is_opt_in() -> None:
    for keep in (False, True):
        engine = make_engine(keep_text=keep)
        engine.warm(DOCS[:1])
        block = engine.store.get(next(iter(engine.store.keys())))
        assert block.header.text == (DOCS[0] if keep else "")  # type: ignore[union-attr]


def test_token_ids_are_a_prompt_too() -> None:
    engine = make_engine()
    ids = tiny_tokenizer()("the river").input_ids
    assert engine.generate(ids, max_new_tokens=4).token_ids == engine.generate("the river", max_new_tokens=4).token_ids
    assert engine.generate(tuple(ids), max_new_tokens=4).report.prompt_tokens == len(ids)


def test_contents_may_be_lists_of_text_blocks() -> None:
    engine = make_engine()
    parts = [{"type": "text", "text": DOCS[0]}, {"type": "text", "text": DOCS[1]}]
    one = engine.generate([{"role": "user", "content": parts}], max_new_tokens=2)
    two = engine.generate([{"role": "user", "content": f"{DOCS[0]}\n\n{DOCS[1]}"}], max_new_tokens=2, reuse="off")
    assert one.token_ids == two.token_ids


def test_messages_are_not_changed() -> None:
    engine = make_engine()
    messages = chat()
    before = json.dumps(messages)
    engine.generate(messages, max_new_tokens=1)
    assert json.dumps(messages) == before


def test_count_tokens_is_what_off_forwards() -> None:
    engine = make_engine()
    for prompt in (chat(), "plain", [1, 2, 3]):
        assert (
            engine.count_tokens(prompt) == engine.generate(prompt, reuse="off", max_new_tokens=1).report.prompt_tokens
        )


def test_results_are_plain_data_on_request() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    data = json.loads(json.dumps(engine.generate(chat(), max_new_tokens=2).as_dict()))
    assert {"text", "token_ids", "finish_reason", "report"} <= set(data)
    assert data["report"]["hits"] == 4
    assert json.loads(json.dumps(engine.stats()))["store"]["blocks"] == 4


def test_the_users_model_and_its_gradients_are_left_alone() -> None:
    model = tiny_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    engine = make_engine(model=model)
    engine.warm(DOCS)
    engine.generate(chat(), max_new_tokens=3)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_an_engine_closes_twice_and_its_own_store_with_it(tmp_path: Path) -> None:
    engine = make_engine(store=tmp_path)
    asyncio.run(engine.agenerate("x", max_new_tokens=1))
    engine.close()
    engine.close()


def test_a_store_can_be_shared() -> None:
    store = MemoryStore()
    one, two = make_engine(store=store), make_engine(store=store)
    one.warm(DOCS)
    assert prepared(two, chat())[1].hits == 4


def test_repairs_compose() -> None:
    union = Repair.boundary(4, 2) | Repair.attention(0.1) | Repair.deviation(0.2) | Repair(cap=0.5)
    assert (union.first, union.last, union.query, union.blend, union.cap) == (4, 2, 0.1, 0.2, 0.5)
    assert (Repair.none() | Repair.full()).everything
    assert Repair.none().is_none
    assert Repair.boundary(4).with_shift().shift
    assert not Repair.boundary(4).is_none
    with pytest.raises(TypeError):
        Repair.none() | "fast"  # type: ignore[operator]


def test_recipes_say_what_is_done_and_labels_what_it_is_called() -> None:
    recipes = {r.recipe for r in (Repair(first=8), Repair(first=9), Repair(first=8, shift=True), Repair(query=0.1))}
    assert len(recipes) == 4
    assert Repair(first=8, name="mine").label == "mine"
    assert Repair(first=8, name="mine").recipe == Repair(first=8).recipe


def test_errors_have_hints_that_survive_pickling() -> None:
    import copy

    with pytest.raises(errors.ContextLengthError) as caught:
        make_engine().generate([5] * 4096, max_new_tokens=1)
    error: Any = copy.copy(caught.value)
    assert error.hint in str(error)
    assert isinstance(error, ValueError)


def test_wrong_arguments_say_what_to_pass() -> None:
    with pytest.raises(errors.UsageError, match="from_pretrained"):
        KVBoost("smollm2", None)
    with pytest.raises(errors.UsageError, match="prefix_bytes"):
        make_engine(prefix_bytes=-1)
    with pytest.raises(errors.UsageError, match="several texts"):
        make_engine().warm(None)  # type: ignore[arg-type]


def test_kv_that_is_not_finite_is_never_stored() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    engine = KVBoost(model, tiny_tokenizer(), store="memory")
    report = engine.warm(DOCS)
    assert report.stored == 0
    assert "NaN" in str(report.problems[0])
    engine.generate(chat(), chunks=DOCS, max_new_tokens=1)
    assert engine.store.stats().as_dict()["blocks"] == 0
