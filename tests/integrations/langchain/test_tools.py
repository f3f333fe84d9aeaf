"""Tools and structured output: every spelling of tool_choice, every method, whole and streamed, and when cut off."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from kvboost_rag.errors import UnknownOptionError, UsageError
from langchain_kvboost_rag import ChatKVBoost
from tests.integrations.langchain.scripted import scripted_engine

ADD = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
BOB = json.dumps({"name": "Bob", "age": 30})


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def negate(a: int) -> int:
    """Negate a number."""
    return -a


def model(answer: str, **fields: Any) -> ChatKVBoost:
    return ChatKVBoost(**{"engine": scripted_engine(answer), "max_tokens": 120, **fields})


def total(llm: Runnable[Any, Any], asked: str = "1 + 2?") -> AIMessage:
    full: Any = None
    for chunk in llm.stream(asked):
        full = chunk if full is None else full + chunk
    return full  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "add", {"type": "function", "function": {"name": "add"}}, {"name": "add"}]
)
def test_a_forced_call_in_every_spelling(choice: Any) -> None:
    llm = model(ADD).bind_tools([add, negate], tool_choice=choice)
    message = llm.invoke("1 + 2?")
    assert [(c["name"], c["args"]) for c in message.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", [None, "auto", False])
def test_a_free_call(choice: Any) -> None:
    llm = model(f"I will add.\n<tool_call>{ADD}</tool_call>").bind_tools([add], tool_choice=choice)
    message = llm.invoke("1 + 2?")
    assert message.content == "I will add."
    assert message.tool_calls[0]["args"] == {"a": 1, "b": 2}


def test_none_hides_the_tools() -> None:
    engine = scripted_engine(ADD)
    message = ChatKVBoost(engine=engine).bind_tools([add], tool_choice="none").invoke("hi")
    assert message.content == ADD
    assert not message.tool_calls
    assert "add" not in str(engine.asked[-1])


def test_a_choice_that_is_no_tool_is_refused() -> None:
    with pytest.raises(UnknownOptionError, match="subtract.*add"):
        model(ADD).bind_tools([add], tool_choice="subtract")
    with pytest.raises(UsageError, match="no tools"):
        model(ADD).bind_tools([], tool_choice="any").invoke("x")


def test_a_free_answer_stays_text_and_streams_piece_by_piece() -> None:
    llm = model("It is three, of course.").bind_tools([add])
    pieces = [c.content for c in llm.stream("1 + 2?") if c.content]
    assert "".join(pieces) == "It is three, of course." == llm.invoke("1 + 2?").content
    assert len(pieces) > 3


@pytest.mark.parametrize(
    "answer", [f"So: <tool_call>{ADD}</tool_call>", ADD, f"[{ADD}, {ADD}]", "<tool_call>{broken</tool_call>", "{x"]
)
def test_streams_and_invokes_agree(answer: str) -> None:
    llm = model(answer).bind_tools([add])
    whole, streamed = llm.invoke("1 + 2?"), total(llm)
    assert streamed.content == whole.content
    bare = [[{k: v for k, v in c.items() if k != "id"} for c in m.tool_calls] for m in (whole, streamed)]
    assert bare[0] == bare[1]
    assert len(whole.invalid_tool_calls) == len(streamed.invalid_tool_calls)
    assert streamed.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


def test_a_broken_call_is_not_lost() -> None:
    message = model("<tool_call>{broken</tool_call>").bind_tools([add]).invoke("x")
    assert not message.tool_calls
    assert "broken" in str(message.invalid_tool_calls[0]["args"])
    assert "broken" in message.content


# --- structured output --------------------------------------------------------------------------------------


class Person(BaseModel):
    """A person."""

    name: str = Field(description="first name")
    age: int


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


SCHEMAS = [Person, PersonDict, Person.model_json_schema()]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["pydantic", "typeddict", "json"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, False])
def test_schemas_and_methods(schema: Any, method: Any, strict: bool | None) -> None:
    forced = json.dumps({"name": "Person" if schema is not PersonDict else "PersonDict", "arguments": json.loads(BOB)})
    llm = model(BOB if method == "json_schema" else forced)
    chain = llm.with_structured_output(schema, method=method, strict=strict)
    expected = Person(name="Bob", age=30) if schema is Person else {"name": "Bob", "age": 30}
    assert chain.invoke("Who?") == expected
    assert list(chain.stream("Who?"))[-1] == expected


def test_the_model_is_told_the_schema() -> None:
    engine = scripted_engine(BOB)
    ChatKVBoost(engine=engine).with_structured_output(Person).invoke([("system", "Be kind."), ("human", "Who?")])
    system = engine.asked[-1][0]["content"]
    assert system.startswith("Be kind.")
    assert '"first name"' in system


def test_include_raw_gives_message_object_and_error() -> None:
    good = model(BOB).with_structured_output(Person, include_raw=True).invoke("Who?")
    assert isinstance(good["raw"], AIMessage)
    assert good["parsed"] == Person(name="Bob", age=30)
    assert good["parsing_error"] is None
    bad = model(BOB, max_tokens=4).with_structured_output(Person, include_raw=True).invoke("Who?")
    assert bad["parsed"] is None
    assert "max_tokens" in str(bad["parsing_error"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_a_cut_off_answer_is_an_error_that_says_so(method: Any) -> None:
    answer = json.dumps({"name": "Person", "arguments": json.loads(BOB)}) if method == "function_calling" else BOB
    chain = model(answer, max_tokens=5).with_structured_output(Person, method=method)
    with pytest.raises(OutputParserException, match="cut off by max_tokens"):
        chain.invoke("Who?")
    with pytest.raises(OutputParserException, match="cut off by max_tokens"):
        asyncio.run(chain.ainvoke("Who?"))


def test_json_mode_takes_any_object() -> None:
    assert model('{"a": [1, 2]}').with_structured_output(None, method="json_mode").invoke("JSON?") == {"a": [1, 2]}
    with pytest.raises(UsageError, match="schema"):
        model(BOB).with_structured_output(None)
    with pytest.raises(UnknownOptionError, match="json_schema"):
        model(BOB).with_structured_output(Person, method="xml")  # type: ignore[arg-type]


def test_response_format_of_a_call_is_honoured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    assert json.loads(model(BOB).invoke("Who?", response_format=form).content) == json.loads(BOB)
    assert model("plain").invoke("Who?", response_format={"type": "text"}).content == "plain"
