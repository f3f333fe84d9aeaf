"""LangChain's standard suites for chat models, over the scripted engine: everything that is about us, not the model."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvboost_rag import ChatKVBoost, warm_documents
from tests.integrations.langchain.scripted import ScriptedKVBoost, last_text, scripted_engine

JOKE = {"setup": "A cat?", "punchline": "The mouse."}  # short: each letter is a token here
CALLS = {
    "magic_function_no_args": {},
    "magic_function": {"input": 3},
    "greeting_generator": {"answer_style": "pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "my_adder_tool": {"a": 1, "b": 2},
}
CHUNKS = [f"Passage {i} says that the river of city {i} was first seen by people in {1000 + i}." for i in (1, 2, 3)]


def answer(prompt: Any, options: dict[str, Any]) -> str:
    """What a good model would say to the suite's questions."""
    asked = last_text(prompt)
    if prompt[-1]["content"].startswith("Result"):
        return "It is sunny."
    for name, call in (("你好啊集团", "你好啊集团"), ("こんにちは株式会社", "こんにちは株式会社")):
        if name in asked:
            return _call("unicode_customer", {"customer_name": call, "description": "x"})
    if "joke" in asked:
        forced_call = '"name"' in str(prompt[0]["content"]) and "You can call" in str(prompt[0]["content"])
        joke = {"setup": JOKE["setup"]} if "just the setup" in asked.lower() else JOKE
        return _call("Joke", joke) if forced_call else json.dumps(joke)
    if "3 + 4" in asked:
        return _call("my_adder_tool", {"a": 3, "b": 4})
    if asked == "Hello!" and options.get("logits_processors"):
        return _call("magic_function", {"input": 3})
    for name, arguments in CALLS.items():
        if name in asked or name.split("_")[0] in asked.lower() or name.split("_")[-1] in asked:
            if f'"name": "{name}"' in str(prompt[0]["content"]):
                return _call(name, arguments)
    return "Hello there, how are you?"


def _call(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@lru_cache(maxsize=1)
def engine() -> ScriptedKVBoost:
    return scripted_engine(answer)


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatKVBoost]:
        return ChatKVBoost

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2", "store": "memory"}


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatKVBoost]:
        return ChatKVBoost

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": engine(), "max_tokens": 120}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # this engine was handed over as an object; by name it is tested in test_fields.py

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        kinds = ["cache_read_input", "cache_creation_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatKVBoost(engine=engine())
        warm_documents(llm, [Document(c) for c in CHUNKS])
        message = _ask(llm, "\n\n".join(CHUNKS), stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        fresh = f"Nobody has told yet what the {'streamed' if stream else 'whole'} passage of this test is about."
        message = _ask(ChatKVBoost(engine=engine()), fresh, stream, chunks=[fresh])
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message


def _ask(llm: BaseChatModel, context: str, stream: bool, **options: Any) -> AIMessage:
    messages = [("system", f"Use the context.\n\n{context}"), ("human", "What is said?")]
    if not stream:
        return llm.invoke(messages, **options)
    full: AIMessageChunk | None = None
    for chunk in llm.stream(messages, **options):
        assert isinstance(chunk, AIMessageChunk)
        full = chunk if full is None else full + chunk
    assert full is not None
    return full
