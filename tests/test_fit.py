"""Messages made to fit a chat template: as little as it demands, every content verbatim."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost_rag import fit_messages
from kvboost_rag.engine.fit import template_abilities
from kvboost_rag.engine.render import render_chat
from kvboost_rag.errors import TokenizerError
from tests.tiny_tokenizers import tiny_tokenizer

STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
)
FULL = (
    "{% if tools %}{% for t in tools %}{{ t['function']['name'] }};{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}({{ c['function']['arguments'] }}){% endfor %}"
    "{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "tide", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": {"high": True}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "S {one}"},
    {"role": "user", "content": "first"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "at nine", "name": "tide", "tool_call_id": "1"},
    {"role": "system", "content": "late"},
    {"role": "user", "content": "third"},
]


def test_a_template_that_can_do_it_all_gets_everything_as_it_is() -> None:
    messages, tools = fit_messages(tiny_tokenizer(chat_template=FULL), TALK, [TOOL])
    assert [m["role"] for m in messages] == [m["role"] for m in TALK]
    assert tools == [TOOL]


@pytest.mark.parametrize("template", [STRICT, FULL, None], ids=["strict", "full", "chatml"])
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("length", range(1, len(TALK) + 1))
def test_whatever_comes_out_renders_with_every_content_in_it(template: Any, tools: list[Any], length: int) -> None:
    tokenizer = tiny_tokenizer(chat_template=template) if template else tiny_tokenizer()
    messages, native = fit_messages(tokenizer, TALK[:length], tools)
    text = render_chat(tokenizer, messages, tools=native or None).text
    assert all(m["content"] in text for m in TALK[:length] if m["content"])
    if tools or length > 3:
        assert "tide" in text
    contents = [m["content"] for m in messages]
    assert all(any(m["content"] in c for c in contents) for m in TALK[:length] if m["content"])


def test_a_strict_template_gets_one_turn_each() -> None:
    messages, tools = fit_messages(tiny_tokenizer(chat_template=STRICT), TALK, [TOOL])
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert tools == []
    assert messages[0]["content"].startswith("S {one}")
    assert "at nine" in messages[2]["content"]


def test_no_template_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        fit_messages(tiny_tokenizer(chat_template=None), TALK)


def test_abilities_are_remembered_by_template() -> None:
    assert template_abilities(tiny_tokenizer()) is template_abilities(tiny_tokenizer())
    assert template_abilities(tiny_tokenizer()) is not template_abilities(tiny_tokenizer(chat_template=STRICT))
