"""What users of local models in LangChain complain about most, each as a test of our classes.

The numbers are those of the list that the tests were made from; what concerns LlamaIndex alone is tested there. Many of
these are also proved in more detail elsewhere in this folder; here stands the complaint in its shortest form.
"""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from transformers import LogitsProcessor

from kvboost_rag.errors import ContextLengthError, ModelNotFoundError, TokenizerError
from langchain_kvboost_rag import ChatKVBoost, KVBoostLLM
from tests.integrations.langchain.scripted import ScriptedKVBoost, scripted_engine
from tests.integrations.langchain.test_messages import STRICT
from tests.tiny import save_tiny, tiny_tokenizer

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


def chat(answer: str = "hello there", **fields: Any) -> ChatKVBoost:
    return ChatKVBoost(**{"engine": scripted_engine(answer), **fields})


def rendered(engine: ScriptedKVBoost) -> str:
    shape = {k: v for k, v in engine.options[-1].items() if k in ("tools", "template_kwargs")}
    return engine.render(engine.asked[-1], **shape)


def test_01_tools_reach_the_prompt_and_calls_are_parsed() -> None:
    engine = scripted_engine(CALL)
    message = ChatKVBoost(engine=engine).bind_tools([weather]).invoke("Rome?")
    assert "Weather of a city." in rendered(engine)
    assert message.tool_calls[0]["args"] == {"city": "Rome"}


def test_02_streaming_does_not_arrive_in_one_lump() -> None:
    words = "one two three four five six seven eight"
    for llm in (chat(words), KVBoostLLM(engine=scripted_engine(words))):
        assert len(list(llm.stream("x"))) >= 8


def test_03_async_works_in_every_form() -> None:
    async def everything(llm: Any) -> list[Any]:
        streamed = [c async for c in llm.astream("x")]
        events = [e async for e in llm.astream_events("x", version="v2")]
        return [await llm.ainvoke("x"), streamed, await llm.abatch(["x", "y"]), events]

    for llm in (chat(), KVBoostLLM(engine=scripted_engine("hello there"))):
        assert all(asyncio.run(everything(llm)))


def test_04_async_does_not_block_the_loop() -> None:
    """The answer waits for the loop: a blocked loop would never let it go on."""
    opened = threading.Event()

    class Wait(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert opened.wait(60), "the event loop did not run while the model computed"
            return scores

    async def ask() -> str:
        task = asyncio.create_task(chat().ainvoke("x", logits_processors=[Wait()]))
        await asyncio.sleep(0)
        opened.set()
        return str((await task).content)

    assert asyncio.run(ask()) == "hello there"


def test_05_stop_is_honoured_everywhere() -> None:
    text = "one STOP two"
    by_call, by_field = chat(text), chat(text, stop=["STOP"])
    assert by_call.invoke("x", stop=["STOP"]).content == "one "
    assert by_field.invoke("x").content == "one "
    assert "".join(c.content for c in by_call.stream("x", stop=["STOP"])) == "one "
    assert by_call.bind(stop=["O"]).invoke("x").content == "one ST"
    assert asyncio.run(by_field.ainvoke("x")).content == "one "
    assert by_field.invoke("x").response_metadata["finish_reason"] == "stop"


def test_06_the_chat_template_is_applied_and_the_turn_ends() -> None:
    engine = scripted_engine("short")
    message = ChatKVBoost(engine=engine).invoke("x")
    assert rendered(engine).endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    assert (message.content, message.response_metadata["finish_reason"]) == ("short", "stop")


def test_07_a_missing_chat_template_is_a_clear_error_and_a_text_model_works() -> None:
    engine = scripted_engine("fine", tokenizer=tiny_tokenizer(chat_template=None))
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatKVBoost(engine=engine).invoke("x")
    assert KVBoostLLM(engine=engine).invoke("x") == "fine"


def test_08_a_template_without_a_system_role_takes_system_messages() -> None:
    engine = scripted_engine("ok", tokenizer=tiny_tokenizer(chat_template=STRICT))
    ChatKVBoost(engine=engine).invoke([SystemMessage("be short"), HumanMessage("hi")])
    assert "be short\n\nhi" in rendered(engine)


def test_09_roles_need_not_alternate() -> None:
    engine = scripted_engine("ok", tokenizer=tiny_tokenizer(chat_template=STRICT))
    ChatKVBoost(engine=engine).invoke([HumanMessage("a"), HumanMessage("b"), AIMessage("c"), AIMessage("d")])
    assert "a\n\nb" in rendered(engine)
    assert "c\n\nd" in rendered(engine)


def test_10_the_last_message_may_be_a_tools_or_the_assistants() -> None:
    call = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "1"}])
    assert chat().invoke([HumanMessage("x"), call, ToolMessage("sunny", tool_call_id="1")]).content == "hello there"
    assert chat().invoke([HumanMessage("x"), AIMessage("I think")]).content == "hello there"


def test_11_the_answer_does_not_repeat_the_prompt() -> None:
    assert "what is asked" not in str(chat().invoke("what is asked").content)
    assert KVBoostLLM(engine=scripted_engine("hello there")).invoke("what is asked") == "hello there"


def test_12_no_control_tokens_in_the_text() -> None:
    llm = chat("hello<|im_start|> there")
    for text in (llm.invoke("x").content, "".join(str(c.content) for c in llm.stream("x"))):
        assert text == "hello there"


def test_13_too_long_a_prompt_names_the_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"\d+ tokens.*window of 4096.*at most"):
        chat().invoke("word " * 5000)
    llm = chat()
    assert llm.profile is not None
    assert llm.profile["max_input_tokens"] == 4096


def test_14_usage_is_there_once_in_every_form() -> None:
    llm = chat()
    whole = llm.invoke("x").usage_metadata
    assert whole is not None
    assert whole["total_tokens"] == whole["input_tokens"] + whole["output_tokens"] > 0
    chunks = list(llm.stream("x"))
    assert next(c.usage_metadata for c in chunks if c.usage_metadata)["input_tokens"] == whole["input_tokens"]
    assert sum(c.usage_metadata is not None for c in chunks) == 1
    result = llm.generate([[HumanMessage("x")], [HumanMessage("x")]])
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == "scripted"
    assert result.llm_output["token_usage"]["prompt_tokens"] == 2 * whole["input_tokens"]


def test_15_structured_output_is_an_object_or_an_error_and_never_none() -> None:
    schema = {"title": "Town", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for method, answer in (
        ("json_schema", '{"n": 3}'),
        ("function_calling", '{"name": "Town", "arguments": {"n": 3}}'),
    ):
        assert chat(answer).with_structured_output(schema, method=method).invoke("x") == {"n": 3}
        with pytest.raises(ValueError, match="max_tokens"):
            chat(answer, max_tokens=2).with_structured_output(schema, method=method).invoke("x")


def test_16_the_class_says_that_it_calls_tools() -> None:
    profile = chat().profile
    assert profile is not None
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert profile["structured_output"]


def test_17_many_threads_at_once() -> None:
    engine = scripted_engine(lambda prompt, options: f"to {prompt[-1]['content']}")
    llm = ChatKVBoost(engine=engine)
    answers: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i: answers.update({i: llm.invoke(str(i)).content})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"to {i}" for i in range(6)}


def test_18_memory_is_released_and_messages_hold_no_tensors() -> None:
    engine = scripted_engine("hi")
    llm = ChatKVBoost(engine=engine)
    message = llm.invoke("x")
    json.dumps(message.response_metadata)  # plain values only
    gone = ref(engine)
    del llm, engine
    gc.collect()
    assert gone() is None
    assert message.response_metadata["kvboost"]["prompt_tokens"] > 0


def test_19_options_of_calls_and_streams_are_honoured_and_batches_run() -> None:
    engine = scripted_engine("one two three four five six")
    llm = ChatKVBoost(engine=engine, max_tokens=30)
    assert llm.invoke("x", max_tokens=2).response_metadata["finish_reason"] == "length"
    assert list(llm.stream("x", max_tokens=2))[-1].response_metadata["finish_reason"] == "length"
    assert len(llm.batch(["a", "b"], max_tokens=2)) == 2
    assert KVBoostLLM(engine=engine).invoke("x") == "one two three four five six"  # not the twenty of transformers


def test_20_an_error_while_generating_is_raised_not_hung() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken on purpose")

    for ask in (
        lambda llm: llm.invoke("x", logits_processors=[Broken()]),
        lambda llm: list(llm.stream("x", logits_processors=[Broken()])),
        lambda llm: asyncio.run(llm.ainvoke("x", logits_processors=[Broken()])),
    ):
        with pytest.raises(RuntimeError, match="on purpose"):
            ask(chat())
    assert chat().invoke("x").content == "hello there"


def test_20_models_can_be_pickled(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    llm = ChatKVBoost(model=str(folder), store="memory", max_tokens=2, engine_options={"filler_tokens": 32})
    llm.invoke("x")
    chain = ChatPromptTemplate.from_messages([("human", "{q}")]) | llm
    assert pickle.loads(pickle.dumps(chain)).invoke({"q": "x"}).content == chain.invoke({"q": "x"}).content


def test_20_the_start_token_stands_once() -> None:
    engine = scripted_engine("hi")
    message = ChatKVBoost(engine=engine).invoke("x")
    assert rendered(engine).count("<s>") == 1
    ids = engine.tokenizer(rendered(engine), add_special_tokens=False)["input_ids"]
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == len(ids)


def test_20_the_system_prompt_is_not_ignored() -> None:
    engine = scripted_engine("hi")
    ChatKVBoost(engine=engine).invoke([("system", "speak like a sailor"), ("human", "x")])
    assert "<|im_start|>system\nspeak like a sailor<|im_end|>" in rendered(engine)


def test_20_a_local_model_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    folder = save_tiny(tmp_path / "m")

    def no_network(*args: Any) -> None:
        raise AssertionError("a local model asked the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    llm = ChatKVBoost(model=str(folder), store="memory", max_tokens=2, engine_options={"filler_tokens": 32})
    assert llm.get_num_tokens("some words") > 0
    llm.invoke("x")
    with pytest.raises(ModelNotFoundError):
        ChatKVBoost(model=str(tmp_path / "nothing here"), store="memory").invoke("x")
