"""What the model is told: content blocks, roles that a template lacks, documents that travel inside messages."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool

from kvboost_rag.errors import TokenizerError, UsageError
from langchain_kvboost_rag import ChatKVBoost
from tests.integrations.langchain.scripted import ScriptedKVBoost, scripted_engine
from tests.tiny import tiny_tokenizer

CHUNK = "The first lamp of the lighthouse burned rapeseed oil until the year 1902."
OTHER = "The last keeper served for twenty-six years and fed the sea birds there."

STRICT = (  # as Mistral's and Gemma's: no system role, user and assistant in turn, contents trimmed
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = (  # as SmolLM2's and Llama's: a default system message, and today's date
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}"
    "{% endif %}{{ 'Today is ' + (date_string if date_string is defined else strftime_now('%d %b %Y')) + '\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ask(messages: list[BaseMessage], template: str | None = None, **options: Any) -> tuple[str, AIMessage]:
    """The rendered prompt and the answer."""
    tokenizer = tiny_tokenizer(chat_template=template) if template else tiny_tokenizer()
    engine = scripted_engine("yes", tokenizer=tokenizer)
    answer = ChatKVBoost(engine=engine).invoke(messages, **options)
    shape = {k: v for k, v in engine.options[-1].items() if k in ("tools", "template_kwargs")}
    return engine.render(engine.asked[-1], **shape), answer


def told(engine: ScriptedKVBoost) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in engine.asked[-1]]


def test_every_kind_of_message_and_block() -> None:
    engine = scripted_engine("yes")
    v1 = AIMessage(
        [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a block"}],
        response_metadata={"output_version": "v1"},
    )
    ChatKVBoost(engine=engine).invoke(
        [
            SystemMessage("be short"),
            HumanMessage(
                ["one", {"type": "text", "text": "two"}, {"type": "text-plain", "text": "three", "title": "T"}]
            ),
            v1,
            ChatMessage(role="human", content="four"),
            AIMessage([{"type": "text", "text": "five"}, {"type": "tool_use", "name": "f", "input": {}, "id": "1"}]),
            FunctionMessage(name="f", content="six"),
            HumanMessage([{"type": "document", "source": {"type": "text", "data": "seven"}}]),
            HumanMessage([{"type": "search_result", "title": "S", "content": [{"type": "text", "text": "eight"}]}]),
        ]
    )
    assert told(engine) == [
        ("system", "be short"), ("user", "one\n\ntwo\n\nT\nthree"), ("assistant", "a block"), ("user", "four"),
        ("assistant", "five"), ("user", "Result of f:\nsix"), ("user", "seven"), ("user", "S\neight"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "file"])
def test_what_a_text_model_cannot_read_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=kind):
        ChatKVBoost(engine=scripted_engine("x")).invoke([HumanMessage([{"type": kind, "url": "u", "base64": "b"}])])
    with pytest.raises(UsageError, match="RemoveMessage"):
        ChatKVBoost(engine=scripted_engine("x")).invoke([HumanMessage("x"), RemoveMessage(id="1")])


def test_no_system_role_and_strict_alternation() -> None:
    text, _ = ask(
        [SystemMessage("rule one"), HumanMessage("q1"), HumanMessage("q2"), AIMessage("a1"), AIMessage("a2"),
         SystemMessage("rule two"), HumanMessage("q3")],
        STRICT,
    )  # fmt: skip
    assert text == (
        "<s><|im_start|>user\nrule one\n\nrule two\n\nq1\n\nq2<|im_end|>\n"
        "<|im_start|>assistant\na1\n\na2<|im_end|>\n<|im_start|>user\nq3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_may_begin_with_the_assistant() -> None:
    text, answer = ask([AIMessage("Welcome."), HumanMessage("hi")], STRICT)
    assert "Welcome." in text
    assert answer.content == "yes"


def test_tools_reach_a_template_that_knows_none() -> None:
    @tool
    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    messages: list[BaseMessage] = [
        HumanMessage("what is a ferry?"),
        AIMessage("", tool_calls=[{"name": "look_up", "args": {"word": "ferry"}, "id": "call_123"}]),
        ToolMessage(CHUNK, tool_call_id="call_123", status="error"),
    ]
    engine = scripted_engine("a ship", tokenizer=tiny_tokenizer(chat_template=STRICT))
    answer = ChatKVBoost(engine=engine).bind_tools([look_up]).invoke(messages)
    assert answer.content == "a ship"
    first, call, result = told(engine)
    assert '"name": "look_up"' in first[1]
    assert first[1].endswith("what is a ferry?")
    assert call == ("assistant", '<tool_call>{"name": "look_up", "arguments": {"word": "ferry"}}</tool_call>')
    assert result[0] == "user"
    assert CHUNK in result[1]


def test_a_trimming_template_still_hits() -> None:
    engine = scripted_engine("yes", tokenizer=tiny_tokenizer(chat_template=STRICT))
    llm = ChatKVBoost(engine=engine)
    for turn in ("one", "two"):
        report = llm.invoke([HumanMessage(f"\n {CHUNK} \n\n{turn}?\n")], chunks=[f" {CHUNK}\n"])
        engine.forget()
    assert report.response_metadata["kvboost"]["hits"] == 1


def test_a_template_with_todays_date_still_hits_and_can_be_held_still() -> None:
    text, _ = ask([HumanMessage("hi")], DATED, template_kwargs={"date_string": "1 May 2024"})
    assert "Today is 1 May 2024" in text
    engine = scripted_engine("yes", tokenizer=tiny_tokenizer(chat_template=DATED))
    llm = ChatKVBoost(engine=engine, template_kwargs={"date_string": "1 May 2024"})
    llm.invoke([HumanMessage(f"{CHUNK}\n\none?")], chunks=[CHUNK])
    engine.forget()
    later = llm.invoke([HumanMessage(f"{CHUNK}\n\none?")], template_kwargs={"date_string": "30 September 2031"})
    assert later.response_metadata["kvboost"]["hits"] == 1


def test_no_template_at_all_is_refused_with_a_way_out() -> None:
    engine = scripted_engine("x", tokenizer=tiny_tokenizer(chat_template=None))
    with pytest.raises(TokenizerError, match="no chat template.*plain string prompt"):
        ChatKVBoost(engine=engine).invoke("hi")


# --- documents inside messages ------------------------------------------------------------------------------


def block(text: str) -> dict[str, Any]:
    return {"type": "text-plain", "text": text}


@pytest.mark.parametrize(
    "content",
    [
        [block(CHUNK), block(OTHER), "why?"],
        [{"type": "document", "source": {"type": "text", "data": t}, "title": "T"} for t in (CHUNK, OTHER)],
        [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": t}]}} for t in (CHUNK, OTHER)],
        [{"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": CHUNK}, {"type": "text", "text": OTHER}]}],
        [{"type": "text", "text": t, "extras": {"kvboost": "chunk"}} for t in (CHUNK, OTHER)],
    ],
    ids=["text-plain", "document", "content-document", "search_result", "marked"],
)  # fmt: skip
def test_document_blocks_are_chunks(content: list[Any]) -> None:
    engine = scripted_engine("yes")
    llm = ChatKVBoost(engine=engine)
    first = llm.invoke([HumanMessage(content)]).response_metadata["kvboost"]
    assert (first["hits"], first["misses"]) == (0, 2)
    engine.forget()
    second = llm.invoke([HumanMessage(content[::-1])]).response_metadata["kvboost"]
    assert (second["hits"], second["misses"]) == (2, 0)


@pytest.mark.parametrize(
    "artifact", [Document(CHUNK), [Document(CHUNK)], {"docs": [Document(CHUNK)]}, (Document(CHUNK),)]
)
def test_documents_of_an_artifact_are_chunks(artifact: Any) -> None:
    messages = [
        HumanMessage("q"),
        AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
        ToolMessage(f"Found: {CHUNK}", tool_call_id="1", artifact=artifact),
    ]
    report = ChatKVBoost(engine=scripted_engine("yes")).invoke(messages).response_metadata["kvboost"]
    assert len(report["chunks"]) == 1


def test_an_artifact_that_is_not_in_the_prompt_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    message = ToolMessage("a summary", tool_call_id="1", artifact=[Document(CHUNK), 3, None])
    call = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    report = ChatKVBoost(engine=scripted_engine("y")).invoke([HumanMessage("q"), call, message]).response_metadata
    assert report["kvboost"]["warnings"] == []
    assert "verbatim" not in caplog.text
