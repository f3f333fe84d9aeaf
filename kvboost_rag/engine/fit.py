"""Make chat messages acceptable to a model's own chat template, changing no more than it demands.

Templates differ in what they know: no system role (Gemma), strictly alternating roles (Mistral), no tools (most small
models). What a template can do is found by rendering small probes; where it can all that a conversation needs, the
messages are left as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.engine.render import Message, check_messages, render_chat
from kvboost_rag.errors import TokenizerError

_KNOWN: dict[str, Abilities] = {}  # by template text; there are as many as models in the process
_MOST_KNOWN = 64
_CALL = {"name": "probe_tool", "arguments": {"x": 1}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template renders without complaint and without dropping anything."""

    system: bool  # a system message in front
    late_system: bool  # further system messages
    repeats: bool  # the same role twice in a row
    answer_first: bool  # a conversation that the assistant begins
    tool_calls: bool  # assistant messages with ``tool_calls``
    tool_role: bool  # tool messages after such a call
    tools: bool  # the ``tools=`` list


def template_abilities(tokenizer: Any) -> Abilities:
    """Probe the tokenizer's chat template (remembered).

    Raises:
        TokenizerError: there is no chat template.
    """
    key = repr(getattr(tokenizer, "chat_template", None))
    if key not in _KNOWN:
        while len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[key] = _probe(tokenizer)
    return _KNOWN[key]


def _probe(tokenizer: Any) -> Abilities:
    user, system = {"role": "user", "content": "probe-user"}, {"role": "system", "content": "probe-system"}
    late = {"role": "system", "content": "probe-late"}
    answer = {"role": "assistant", "content": "probe-answer"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a" * 9, "type": "function", "function": _CALL}]}
    result = {"role": "tool", "content": "probe-result", "tool_call_id": "a" * 9, "name": "probe_tool"}

    def can(messages: list[Message], *shown: str, tools: list[Any] | None = None) -> bool:
        try:
            text = render_chat(tokenizer, messages, tools=tools).text
        except TokenizerError:
            return False
        return all(word in text for word in shown)

    render_chat(tokenizer, [user])  # no template at all, or one that refuses even this: say so
    return Abilities(
        system=can([system, user], "probe-system"),
        late_system=can([system, user, answer, late, user], "probe-late"),
        repeats=can([user, {**user, "content": "probe-second"}, answer, answer, user], "probe-second"),
        answer_first=can([answer, user], "probe-answer"),
        tool_calls=can([user, call, answer, user], "probe_tool"),
        tool_role=can([user, call, result], "probe-result"),
        tools=can([user], "probe_tool", tools=[_TOOL]),
    )


def fit_messages(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """``(messages, tools)`` as this model's chat template takes them.

    A missing system role goes into the first user message; an assistant who may not speak first is greeted; repeated
    roles are joined by an empty line where the template wants alternation; tools, calls and results that the template
    does not know are written out as text. Every content stays verbatim inside the message it ends up in.

    Raises:
        TokenizerError: no chat template. UsageError: not a list of messages.
    """
    can = template_abilities(tokenizer)
    out = check_messages(messages)
    native = list(tools)
    if tools and not can.tools:
        out = _with_system(out, tools_as_text(tools))
        native = []
    if not can.tool_calls or not can.tool_role:
        out = [_tools_spelled(message) for message in out]
    if not can.late_system or not can.system:
        out = _system_first(out)
    if not can.system:
        out = _system_into_user(out)
    if not can.answer_first:
        out = _user_first(out)
    if not can.repeats:
        out = _joined(out)
    return out, native


def tools_as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools and how to call them, for models whose template has no place for them."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n"
        'To call one, answer with <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else.'
    )


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": _join(messages[0]["content"], text)}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _tools_spelled(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        name = f" of {message['name']}" if message.get("name") else ""
        return {"role": "user", "content": f"Result{name}:\n{message['content']}"}
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    spelled = "\n".join(f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in calls)
    return {"role": "assistant", "content": _join(message["content"], spelled)}


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [m["content"] for m in messages if m["role"] in ("system", "developer")]
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *rest] if system else rest


def _system_into_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if messages[0]["role"] != "system":
        return messages
    text, rest = messages[0]["content"], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _join(text, rest[0]["content"])}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _user_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A greeting in front of an assistant who speaks first."""
    at = next((i for i, m in enumerate(messages) if m["role"] != "system"), None)
    if at is None or messages[at]["role"] != "assistant":
        return messages
    return [*messages[:at], {"role": "user", "content": "Hello."}, *messages[at:]]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for message in messages:
        plain = not message.get("tool_calls") and message["role"] != "tool"
        if out and plain and out[-1]["role"] == message["role"] and not out[-1].get("tool_calls"):
            out[-1] = {**out[-1], "content": _join(out[-1]["content"], message["content"])}
        else:
            out.append(message)
    return out


def _join(first: str, second: str) -> str:
    return "\n\n".join(part for part in (first, second) if part)
