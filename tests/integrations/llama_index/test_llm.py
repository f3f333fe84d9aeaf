"""The eight methods, and what the LLM tells about itself."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.llms.kvboost_rag import KVBoostLLM

from kvboost_rag import Repair
from kvboost_rag.errors import KVBoostError, UnknownOptionError, UsageError

HELLO = [ChatMessage(role="user", content="Hello there, what is the first question?")]
TEXT = "Hello there, what is the first question?"


async def _achat_stream(llm: KVBoostLLM, **kwargs: Any) -> list[Any]:
    return [r async for r in await llm.astream_chat(HELLO, **kwargs)]


async def _acomplete_stream(llm: KVBoostLLM, **kwargs: Any) -> list[Any]:
    return [r async for r in await llm.astream_complete(TEXT, **kwargs)]


CALLS: dict[str, Callable[..., list[Any]]] = {
    "chat": lambda llm, **k: [llm.chat(HELLO, **k)],
    "stream_chat": lambda llm, **k: list(llm.stream_chat(HELLO, **k)),
    "achat": lambda llm, **k: [asyncio.run(llm.achat(HELLO, **k))],
    "astream_chat": lambda llm, **k: asyncio.run(_achat_stream(llm, **k)),
    "complete": lambda llm, **k: [llm.complete(TEXT, **k)],
    "stream_complete": lambda llm, **k: list(llm.stream_complete(TEXT, **k)),
    "acomplete": lambda llm, **k: [asyncio.run(llm.acomplete(TEXT, **k))],
    "astream_complete": lambda llm, **k: asyncio.run(_acomplete_stream(llm, **k)),
}
METHODS = list(CALLS)


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


@pytest.fixture
def events() -> Any:
    """Names of the LLM events between two points."""

    class Recorder(BaseEventHandler):
        names: list[str] = []

        @classmethod
        def class_name(cls) -> str:
            return "Recorder"

        def handle(self, event: Any, **kwargs: Any) -> None:
            self.names.append(type(event).__name__)

    recorder = Recorder()
    root = get_dispatcher("root")
    root.add_event_handler(recorder)
    yield recorder.names
    root.event_handlers.remove(recorder)


def test_all_methods_give_the_same_text(llm: KVBoostLLM) -> None:
    texts = {name: text_of(call(llm)[-1]) for name, call in CALLS.items()}
    assert len(set(texts.values())) == 1
    assert texts["chat"]


@pytest.mark.parametrize("method", METHODS)
def test_one_pair_of_events_and_one_count_per_call(
    method: str, llm: KVBoostLLM, counter: TokenCountingHandler, reports: list[Any], events: list[str]
) -> None:
    llm.callback_manager = CallbackManager([counter])
    response = CALLS[method](llm)[-1]
    kind = "Chat" if "chat" in method else "Completion"
    assert events.count(f"LLM{kind}StartEvent") == events.count(f"LLM{kind}EndEvent") == 1
    assert not [e for e in events if ("Completion" if kind == "Chat" else "LLMChat") in e]
    assert len(counter.llm_token_counts) == len(reports) == 1
    assert counter.prompt_llm_token_count == reports[0].prompt_tokens == response.raw["usage"]["prompt_tokens"]
    assert counter.completion_llm_token_count == reports[0].new_tokens == response.raw["usage"]["completion_tokens"]


@pytest.mark.parametrize("method", [m for m in METHODS if "stream" in m])
def test_streams_grow_and_add_up(method: str, llm: KVBoostLLM) -> None:
    responses = CALLS[method](llm)
    so_far = ""
    for response in responses:
        so_far += response.delta
        assert text_of(response) == so_far
    assert len(responses) > 3
    assert all(r.raw is None for r in responses[:-1]), "counters read the last response only"


@pytest.mark.parametrize("method", METHODS)
def test_usage_is_plain_json(method: str, llm: KVBoostLLM) -> None:
    response = CALLS[method](llm)[-1]
    assert json.loads(json.dumps(response.raw)) == response.raw
    usage = response.raw["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert response.additional_kwargs == usage
    assert response.raw["report"]["prompt_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("method", METHODS)
def test_options_of_a_call_stand_above_fields(method: str, llm: KVBoostLLM) -> None:
    response = CALLS[method](llm, max_tokens=2, reuse="off")[-1]
    assert response.raw["usage"]["completion_tokens"] == 2
    assert response.raw["report"]["reuse"] == "off"


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_option_is_an_error_with_the_known_ones(method: str, llm: KVBoostLLM) -> None:
    with pytest.raises(UnknownOptionError, match="max_tokens"):
        CALLS[method](llm, max_lenght=3)


def test_formatted_prompts_are_left_alone(llm: KVBoostLLM) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.complete(prompt, formatted=True).text == llm.chat([ChatMessage(content="hi")]).message.content
    plain = llm.complete("hi", formatted=True).raw["usage"]["prompt_tokens"]
    assert plain < llm.complete("hi").raw["usage"]["prompt_tokens"], "an unformatted one is a user message"


def test_own_prompt_functions_are_used(make_llm: Callable[..., KVBoostLLM], reports: list[Any]) -> None:
    llm = make_llm(
        messages_to_prompt=lambda messages: "M:" + "".join(str(m.content) for m in messages),
        completion_to_prompt=lambda text: "C:" + text,
    )
    llm.chat([ChatMessage(content="hi")])
    llm.complete("hi")
    expected = 1 + llm.count_tokens("M:hi"), 1 + llm.count_tokens("C:hi")  # and the start token
    assert tuple(r.prompt_tokens for r in reports) == expected


def test_blocks_of_a_message_are_joined_and_pictures_refused(llm: KVBoostLLM) -> None:
    two = ChatMessage(blocks=[TextBlock(text="one"), TextBlock(text="two")])
    assert llm.count_tokens([two]) == llm.count_tokens([ChatMessage(content="one\ntwo")])
    with pytest.raises(UsageError, match="text only"):
        llm.chat([ChatMessage(blocks=[ImageBlock(image=b"abc")])])


def test_metadata_is_true(make_llm: Callable[..., KVBoostLLM]) -> None:
    llm = make_llm()
    data = llm.metadata
    assert (data.context_window, data.num_output) == (4096, 6)
    assert data.is_chat_model
    assert data.is_function_calling_model
    assert data.system_role == MessageRole.SYSTEM
    assert data.model_name == llm.model
    assert make_llm(context_window=512).metadata.context_window == 512
    assert make_llm(context_window=10**6).metadata.context_window == 4096
    assert not make_llm(is_function_calling_model=False).metadata.is_function_calling_model


def test_serialised_forms_hold_no_secrets(make_llm: Callable[..., KVBoostLLM]) -> None:
    llm = make_llm()
    llm.store, llm.engine_options = "redis://me:hush@host/0", {"salt": "hush", "filler_tokens": 32}
    for form in (llm.to_dict(), llm.to_payload(), llm.model_dump()):
        assert "hush" not in json.dumps(form, default=str)
    assert llm.to_dict()["engine_options"] == {"filler_tokens": 32}
    payload = llm.to_payload()
    assert payload["class_name"] == "KVBoostLLM"
    assert {"model", "temperature", "context_window"} <= payload.keys()
    assert "BaseLLM" in [c.__name__ for c in KVBoostLLM.__mro__]


def test_copies_share_the_engine(llm: KVBoostLLM) -> None:
    copies = [copy.copy(llm), copy.deepcopy(llm), llm.model_copy(), pickle.loads(pickle.dumps(llm))]
    assert all(c.engine is llm.engine for c in copies)
    assert len({c.chat(HELLO).message.content for c in [llm, *copies]}) == 1


def test_equal_requests_load_once(tmp_path: Any, tokenizer: Any) -> None:
    from tests.tiny import save_tiny

    folder = str(save_tiny(tmp_path / "m", tokenizer=tokenizer))
    first = KVBoostLLM(model=folder, store="memory", max_tokens=2)
    again = KVBoostLLM.from_dict(first.to_dict())
    other = KVBoostLLM(model=folder, store=str(tmp_path / "kv"), max_tokens=2)
    assert again.engine is first.engine
    assert other.engine is not first.engine
    assert other.engine.adapter.model is first.engine.adapter.model
    revived = pickle.loads(pickle.dumps(first))
    assert revived.engine is first.engine
    assert revived.chat(HELLO).message.content == first.chat(HELLO).message.content


def test_a_repair_value_survives_its_dict(make_llm: Callable[..., KVBoostLLM]) -> None:
    llm = make_llm(repair=Repair(first=4))
    data = json.loads(llm.to_json())
    assert make_llm(repair=data["repair"]).repair == Repair(first=4)


@pytest.mark.parametrize("field", [{"reuse": "chunk"}, {"temperature": -1}, {"max_tokens": 0}, {"repair": "balance"}])
def test_wrong_fields_are_refused_at_once(field: dict[str, Any], make_llm: Callable[..., KVBoostLLM]) -> None:
    with pytest.raises(ValueError, match=r"known|greater"):
        make_llm(**field)


def test_an_unknown_model_is_a_typed_error() -> None:
    with pytest.raises(KVBoostError):
        KVBoostLLM(model="./no/such/folder", store="memory")


def test_the_system_prompt_is_used_once(make_llm: Callable[..., KVBoostLLM], reports: list[Any]) -> None:
    from llama_index.core.prompts import PromptTemplate

    llm = make_llm(system_prompt="You are terse.")
    llm.predict(PromptTemplate("{x}"), x="hi")
    both = [ChatMessage(role="system", content="You are terse."), ChatMessage(content="hi")]
    assert reports[-1].prompt_tokens == llm.count_tokens(both)


def test_global_tokenizer_counts_this_models_tokens(llm: KVBoostLLM) -> None:
    from llama_index.core.utils import get_tokenizer

    llm.set_global_tokenizer()
    assert len(get_tokenizer()(TEXT)) == llm.count_tokens(TEXT) > 1
