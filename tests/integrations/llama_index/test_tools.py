"""Tool calls and structured output: forced ones cannot go wrong in form, whatever the model."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.kvboost_rag import KVBoostLLM
from llama_index.llms.kvboost_rag.responses import Call, ChatAssembler
from llama_index.llms.kvboost_rag.tools import choose
from pydantic import BaseModel

from kvboost_rag import Report, Result
from kvboost_rag.errors import UsageError

pytest.importorskip("llguidance", reason="constrained decoding needs llguidance (make setup)")


class Boat(BaseModel):
    """A boat."""

    kind: Literal["ferry", "tug"]
    fast: bool


class PickBoat(BaseModel):
    """Pick a boat."""

    boat: Boat
    express: bool


def pick_boat(boat: Any, express: bool) -> str:
    """Pick a boat."""
    return f"{boat}:{express}"


def next_tide(high: bool) -> str:
    """When the next tide is."""
    return f"tide {high}"


TOOLS = [FunctionTool.from_defaults(pick_boat, fn_schema=PickBoat), FunctionTool.from_defaults(next_tide)]


@pytest.fixture
def llm(make_llm: Any) -> KVBoostLLM:
    return make_llm(max_tokens=120)


def check_pick(arguments: dict[str, Any]) -> None:
    assert arguments.keys() == {"boat", "express"}
    Boat.model_validate(arguments["boat"])
    assert isinstance(arguments["express"], bool)


def test_a_forced_tool_is_called_with_valid_arguments(llm: KVBoostLLM) -> None:
    response = llm.chat_with_tools(TOOLS, "Which boat?", tool_choice="pick_boat")
    (call,) = llm.get_tool_calls_from_response(response)
    assert call.tool_name == "pick_boat"
    assert call.tool_id
    check_pick(call.tool_kwargs)
    assert not response.message.content


def test_required_forces_one_of_several(llm: KVBoostLLM) -> None:
    response = llm.chat_with_tools(TOOLS, "Tide?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(response)
    assert call.tool_name in {"pick_boat", "next_tide"}


def test_streamed_forced_calls_grow_and_keep_their_id(llm: KVBoostLLM) -> None:
    responses = list(llm.stream_chat_with_tools(TOOLS, "Which boat?", tool_choice="pick_boat"))
    found = [llm.get_tool_calls_from_response(r, error_on_no_tool_call=False) for r in responses]
    assert len({call.tool_id for calls in found for call in calls}) == 1
    check_pick(found[-1][0].tool_kwargs)
    assert not "".join(r.delta or "" for r in responses), "a call is not shown as text"


def test_async_forced_call(llm: KVBoostLLM) -> None:
    async def scenario() -> list[Any]:
        response = await llm.achat_with_tools(TOOLS, "Which boat?", tool_choice="next_tide")
        return llm.get_tool_calls_from_response(response)

    (call,) = asyncio.run(scenario())
    assert call.tool_kwargs.keys() == {"high"}


def test_predict_and_call_runs_the_tool(llm: KVBoostLLM) -> None:
    response = llm.predict_and_call(TOOLS, "Tide?", tool_choice="next_tide", tool_required=True)
    assert response.response in ("tide True", "tide False")


def test_tools_reach_the_prompt(llm: KVBoostLLM, reports: list[Any]) -> None:
    llm.chat([ChatMessage(content="Tide?")], max_tokens=1)
    llm.chat_with_tools(TOOLS, "Tide?", max_tokens=1)
    assert reports[1].prompt_tokens > reports[0].prompt_tokens + 100


def test_no_call_is_an_error_that_helps(llm: KVBoostLLM) -> None:
    response = llm.chat_with_tools(TOOLS, "Tide?", max_tokens=2)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(UsageError, match="max_tokens"):
        llm.get_tool_calls_from_response(response)
    with pytest.raises(UsageError, match="next_tide"):
        llm.chat_with_tools(TOOLS, "Tide?", tool_choice="no_such")


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, ["a", "b"], False),
        ("auto", ["a", "b"], False),
        ("none", [], False),
        ("any", ["a", "b"], True),
        ("required", ["a", "b"], True),
        (True, ["a", "b"], True),
        (False, ["a", "b"], False),
        ("b", ["b"], True),
        ({"type": "function", "function": {"name": "b"}}, ["b"], True),
        ({"type": "auto"}, ["a", "b"], False),
    ],
)
def test_tool_choice(choice: Any, names: list[str], forced: bool) -> None:
    tools = [{"type": "function", "function": {"name": n}} for n in "ab"]
    chosen, must = choose(tools, choice)
    assert ([t["function"]["name"] for t in chosen], must) == (names, forced)


SPEC = [{"type": "function", "function": {"name": "next_tide", "parameters": {}}}]
ANSWERS = {
    '<tool_call>{"name": "next_tide", "arguments": {"high": true}}</tool_call>': [{"high": True}],
    '{"name": "next_tide", "parameters": {"high": false}}': [{"high": False}],
    '```json\n{"name": "next_tide", "arguments": {}}\n```': [{}],
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>': [],
    '<tool_call>{"name": "next_tide", "argum': [],
    'The tide {"name": 3}': [],
    "plain words": [],
}


@pytest.mark.parametrize("text", list(ANSWERS))
def test_answers_are_read_the_same_streamed_or_not(text: str, llm: KVBoostLLM) -> None:
    call = Call(llm.engine, [{"role": "user", "content": "x"}], {}, tools=SPEC)
    result = Result(text, [1], "stop", Report())
    whole = ChatAssembler(call).finish(result)
    assembler = ChatAssembler(call)
    pieces: list[ChatResponse] = [assembler.push(c) for c in text] + [assembler.finish(result)]
    for response in (whole, pieces[-1]):
        blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
        assert [b.tool_kwargs for b in blocks] == ANSWERS[text]
    assert pieces[-1].message.content == whole.message.content
    assert "".join(p.delta or "" for p in pieces) == (whole.message.content or "")


def test_histories_with_calls_and_results_are_rendered(llm: KVBoostLLM) -> None:
    history = [
        ChatMessage(role="user", content="Tide?"),
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="c1", tool_name="next_tide", tool_kwargs={"high": True})],
        ),
        ChatMessage(role="tool", content="tide at nine", additional_kwargs={"tool_call_id": "c1", "name": "next_tide"}),
    ]
    short = llm.count_tokens(history[:1])
    assert llm.count_tokens(history) > short + llm.count_tokens("next_tide") + llm.count_tokens("tide at nine")
    assert llm.chat(history, max_tokens=2).message.role == "assistant"


@pytest.mark.parametrize("streaming", [False, True])
def test_function_agent_with_a_forced_tool(streaming: bool, llm: KVBoostLLM) -> None:
    """The first step must call the tool; what a random model says afterwards is its own affair."""
    seen: list[bool] = []

    def tide(high: bool) -> str:
        """When the tide is."""
        seen.append(high)
        return "at nine"

    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(tide)], llm=llm, initial_tool_choice="tide", streaming=streaming
    )

    async def scenario() -> Any:
        return await agent.run("When is high tide?", max_iterations=3)

    output = asyncio.run(scenario())
    assert len(seen) == 1
    assert output.tool_calls[0].tool_name == "tide"
    assert output.raw["usage"]["completion_tokens"] > 0


def test_structured_predict(llm: KVBoostLLM) -> None:
    prompt = PromptTemplate("Name a boat for {place}.")
    boat = llm.structured_predict(Boat, prompt, place="Marrow")
    assert isinstance(boat, Boat)
    assert asyncio.run(llm.astructured_predict(Boat, prompt, place="Marrow")) == boat
    streamed = list(llm.stream_structured_predict(Boat, prompt, place="Marrow"))
    assert streamed[-1] == boat
    assert len(streamed) > 1

    async def astreamed() -> list[Any]:
        return [o async for o in await llm.astream_structured_predict(Boat, prompt, place="Marrow")]

    assert asyncio.run(astreamed())[-1] == boat
    assert llm.as_structured_llm(Boat).chat([ChatMessage(content="A boat?")]).raw.kind in ("ferry", "tug")


def test_structured_answers_that_are_cut_off_say_so(llm: KVBoostLLM) -> None:
    with pytest.raises(UsageError, match="raise max_tokens"):
        llm.structured_predict(Boat, PromptTemplate("A boat."), llm_kwargs={"max_tokens": 3})


def test_the_frameworks_own_programs_work(llm: KVBoostLLM) -> None:
    program = FunctionCallingProgram.from_defaults(Boat, prompt_template_str="Name a boat.", llm=llm)
    assert isinstance(program(), Boat)
    llm.pydantic_program_mode = PydanticProgramMode.FUNCTION
    assert isinstance(llm.structured_predict(Boat, PromptTemplate("A boat.")), Boat)


def test_query_engine_with_an_output_class(make_llm: Any, reports: list[Any]) -> None:
    from llama_index.core import Settings
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.llms.kvboost_rag import KVBoostSynthesizer

    from tests.integrations.llama_index.corpus import ListRetriever, make_nodes

    llm = Settings.llm = make_llm(max_tokens=60)
    for nodes in (make_nodes(), make_nodes()[::-1]):
        engine = RetrieverQueryEngine.from_args(
            ListRetriever(nodes), response_synthesizer=KVBoostSynthesizer(llm=llm, output_cls=Boat)
        )
        assert isinstance(engine.query("Which boat?").response, Boat)
    assert reports[-1].hits == 4
