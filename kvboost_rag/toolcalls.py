"""Read tool calls out of a model's answer, also while it streams.

Known forms: the tokenizer's own response template; ``<tool_call>{…}</tool_call>``; and an answer that is nothing but
JSON ``{"name": …, "arguments": …}`` (or ``"parameters"``), or a list of such, fenced or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
_STARTS = ("{", "[", "```")  # an answer that begins so may be a call as a whole


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """What was meant as a call and is none: the text, and why."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart: what is text, and what is calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    bad: tuple[BadCall, ...] = ()


def parse_tool_calls(text: str, names: Collection[str] = (), *, forced: bool = False) -> ParsedAnswer:
    """Split an answer into text and calls. ``names`` are the tools offered: untagged JSON counts as a call only if it
    names one of them. ``forced``: the answer must be a call, so anything else is a bad one."""
    if OPEN in text:
        items = [_item(m.group(1).strip()) for m in _TAGGED.finditer(text)]
        return _collect(_TAGGED.sub("", text).strip(), [i for group in items for i in group])
    body = text.strip()
    fenced = _FENCED.match(body)
    items_found = _item(fenced.group(1).strip() if fenced else body) if body.startswith(_STARTS) else []
    calls = [i for i in items_found if isinstance(i, ToolCall)]
    if calls and len(calls) == len(items_found) and all(c.name in names for c in calls):
        return ParsedAnswer("", tuple(calls))
    if forced:
        return ParsedAnswer("", (), (BadCall(text, "the answer is not a complete tool call (cut off by max_tokens?)"),))
    return ParsedAnswer(text)


def parse_native(tokenizer: Any, raw: str, prompt: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer | None:
    """The same by the tokenizer's response template; None if it has none or cannot read this answer.

    ``raw`` is the answer with its special tokens, ``prompt`` the rendered prompt in front of it.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        message = tokenizer.parse_response(raw, prefix=prompt, tools=list(tools) or None)
        items = [_from_dict(call.get("function", call), raw) for call in message.get("tool_calls") or ()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # an answer that does not follow the template is read as plain text
    return _collect(str(message.get("content") or ""), items)


def _collect(text: str, items: list[ToolCall | BadCall]) -> ParsedAnswer:
    calls = tuple(i for i in items if isinstance(i, ToolCall))
    return ParsedAnswer(text, calls, tuple(i for i in items if isinstance(i, BadCall)))


def _item(body: str) -> list[ToolCall | BadCall]:
    """One JSON call, a list of them, or several one after the other."""
    try:
        values = list(_json_values(body))
    except ValueError as error:
        return [BadCall(body, f"not JSON: {error}")]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return [_from_dict(v, body) for v in flat] or [BadCall(body, "empty")]


def _json_values(body: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        value, at = decoder.raw_decode(body, at)
        yield value
        while at < len(body) and body[at] in " \t\r\n,;":
            at += 1


def _from_dict(value: Any, body: str) -> ToolCall | BadCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return BadCall(body, "no JSON object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            return BadCall(body, f"arguments are not JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return BadCall(body, "arguments are not an object")
    return ToolCall(value["name"], dict(arguments))


class CallFilter:
    """Lets the text of a streamed answer through and holds back what may be a tool call.

    ``push`` text as it comes, show what it returns; ``finish`` returns what was held: the call, or text after all.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = False  # text that is no call was seen
        self._holding = False

    def push(self, text: str) -> str:
        """Text that is certainly no part of a call."""
        self._held += text
        if self._holding:
            return ""
        if not self._begun:
            body = self._held.lstrip()
            if not body or any(s.startswith(body[: len(s)]) for s in _STARTS):
                self._holding = body.startswith(_STARTS)
                return ""
            self._begun = True
        cut = self._held.find(OPEN)
        self._holding = cut >= 0
        if cut < 0:
            cut = len(self._held) - _overlap(self._held)
        # White space in front of a call is no part of the answer.
        shown = self._held[:cut]
        keep = len(shown) - len(shown.rstrip())
        shown, self._held = shown[: len(shown) - keep], self._held[cut - keep :]
        return shown

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that could begin a tag."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
