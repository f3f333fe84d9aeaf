"""One loaded model behind many objects; identity of objects; fields and options of a call."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import UsageError
from langchain_kvboost_rag import ChatKVBoost, KVBoostLLM
from tests.integrations.langchain.scripted import scripted_engine
from tests.tiny import save_tiny

KINDS = [ChatKVBoost, KVBoostLLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that loads by name."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded."""
    seen: list[str] = []
    real = KVBoost.from_pretrained.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, name: Any, **options: Any) -> KVBoost:
        seen.append(str(name))
        return real(cls, name, **options)

    monkeypatch.setattr(KVBoost, "from_pretrained", classmethod(counted))
    return seen


def by_name(folder: Path, kind: Any = ChatKVBoost, **fields: Any) -> Any:
    options = {"filler_tokens": 32}
    return kind(model=str(folder), store="memory", dtype="float32", engine_options=options, max_tokens=3, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_copy_shares_one_load(kind: Any, folder: Path, loads: list[str]) -> None:
    llm = by_name(folder, kind)
    assert loads == []  # building an object loads nothing
    engine = llm.engine_for()
    others = [
        copy.copy(llm), copy.deepcopy(llm), llm.model_copy(update={"temperature": 0.5}), pickle.loads(pickle.dumps(llm)),
        by_name(folder, kind, temperature=1.0, reuse="prefix"), llm.bind(stop=["x"]).bound, llm.with_config(tags=["t"]).bound,
    ]  # fmt: skip
    assert all(other.engine_for() is engine for other in others)
    assert len(loads) == 1


def test_objects_rebuilt_for_every_call_do_not_load_again(folder: Path, loads: list[str]) -> None:
    llm = by_name(folder).configurable_fields(
        temperature=ConfigurableField(id="t"), store=ConfigurableField(id="store")
    )
    for t in (0.0, 0.5):
        llm.with_config(configurable={"t": t}).invoke("hi")
    assert len(loads) == 1
    for _ in range(2):  # another store over the same weights
        llm.with_config(configurable={"store": None}).invoke("hi")
    assert len(loads) == 1


def test_rebuilt_objects_still_stream(folder: Path) -> None:
    llm = by_name(folder).configurable_fields(temperature=ConfigurableField(id="t"))
    assert len(list(llm.with_config(configurable={"t": 0.0}).stream("hi"))) > 1


def test_the_model_goes_with_the_last_object(folder: Path, loads: list[str]) -> None:
    by_name(folder).engine_for()
    gc.collect()
    by_name(folder).engine_for()
    assert len(loads) == 2


def test_another_model_for_one_call(folder: Path, tmp_path: Path, loads: list[str]) -> None:
    other = str(save_tiny(tmp_path / "other", seed=1))
    llm = by_name(folder)
    for _ in range(2):
        assert llm.invoke("hi", model=other).response_metadata["model_name"] == other
    assert llm.invoke("hi").response_metadata["model_name"] == str(folder)
    assert sorted(loads) == sorted([other, str(folder)])


def test_an_engine_object_is_one_model(folder: Path) -> None:
    engine = scripted_engine("hi")
    llm = ChatKVBoost(engine=engine)
    assert llm.model == "scripted"
    assert llm.engine_for() is engine
    assert copy.deepcopy(llm).engine_for() is engine
    with pytest.raises(UsageError, match="scripted"):
        llm.invoke("hi", model=str(folder))
    with pytest.raises((UsageError, ValidationError), match="scripted"):
        ChatKVBoost(engine=engine, model=str(folder))
    with pytest.raises((UsageError, ValidationError), match="KVBoost"):
        ChatKVBoost(engine="smollm2")


# --- identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"revision": "r2"}, {"dtype": "float32"}, {"temperature": 0.3}, {"max_tokens": 7},
        {"stop": ["x"]}, {"top_p": 0.5}, {"top_k": 4}, {"seed": 1}, {"repetition_penalty": 1.2}, {"reuse": "off"},
        {"repair": "fast"}, {"repair": Repair.boundary(4)}, {"engine_options": {"filler_tokens": 9}},
        {"template_kwargs": {"enable_thinking": False}},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_what_changes_answers_is_part_of_the_identity(kind: Any, change: dict[str, Any]) -> None:
    base, other = kind(model="some"), kind(**{"model": "some", **change})
    assert base._get_llm_string() != other._get_llm_string() if kind is ChatKVBoost else True
    assert base._identifying_params != other._identifying_params
    assert "0x" not in str(other._identifying_params)
    assert kind(model="some")._identifying_params == base._identifying_params


def test_two_settings_never_share_a_cached_answer() -> None:
    cache = InMemoryCache()
    engine = scripted_engine("same words")
    exact = ChatKVBoost(engine=engine, reuse="off", cache=cache)
    exact.invoke("hello")
    asked = len(engine.asked)
    exact.invoke("hello")
    assert len(engine.asked) == asked  # from the cache
    ChatKVBoost(engine=engine, reuse="chunks", cache=cache).invoke("hello")
    assert len(engine.asked) == asked + 1


# --- fields -------------------------------------------------------------------------------------------------


def test_options_of_a_call_reach_the_engine() -> None:
    engine = scripted_engine("hi")
    llm = ChatKVBoost(engine=engine, temperature=0.5, stop=["a"], seed=3)
    llm.invoke("x")
    llm.invoke("x", temperature=0.1, max_tokens=5, stop=["b"], reuse="off", repair="fast", top_k=7, seed=4)
    llm.bind(max_new_tokens=6).invoke("x")
    first, second, third = engine.options
    assert (first["temperature"], first["stop"], first["seed"], first["max_new_tokens"]) == (0.5, ["a"], 3, 256)
    assert (second["temperature"], second["stop"], second["max_new_tokens"], second["top_k"]) == (0.1, ["b"], 5, 7)
    assert (second["reuse"], second["repair"], second["seed"]) == ("off", "fast", 4)
    assert third["max_new_tokens"] == 6


def test_a_misspelt_field_is_told() -> None:
    with pytest.warns(UserWarning, match="did you mean 'temperature'"):
        ChatKVBoost(temprature=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatKVBoost(api_key="x", base_url="y", max_retries=2, timeout=60, stop=[], streaming=True)


def test_an_unknown_option_of_a_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ChatKVBoost(engine=scripted_engine("hi")).invoke("x", temprature=1, parallel_tool_calls=True)
    assert "temprature" in caplog.text
    assert "parallel_tool_calls" not in caplog.text


def test_the_profile_knows_the_window_without_loading(folder: Path) -> None:
    assert ChatKVBoost(model="smollm2").profile["max_input_tokens"] == 8192  # type: ignore[index]
    llm = by_name(folder)
    assert not llm.engine.loaded
    assert llm.profile["max_input_tokens"] == 4096
    assert llm.profile["tool_calling"]
    assert llm.profile["structured_output"]


def test_tokens_are_counted_by_the_models_own_tokenizer() -> None:
    engine = scripted_engine("hi")
    llm = ChatKVBoost(engine=engine)
    text = "the river <|im_end|> of the city"
    assert llm.get_num_tokens(text) == len(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    answer = llm.invoke(text)
    from langchain_core.messages import HumanMessage

    assert llm.get_num_tokens_from_messages([HumanMessage(text)]) == answer.usage_metadata["input_tokens"]  # type: ignore[index]
