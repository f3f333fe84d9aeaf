"""Chat messages to text, with the place of every message's content.

The chat template is rendered to *text*; where the contents stand in it is found by rendering once more with markers.
Both renderings must agree, else contents are searched in order. Only what is outside of contents may be parsed as
special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.errors import EmptyPromptError, TokenizerError, UsageError

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. ``contents`` are the character ranges that came from messages, ascending, non-overlapping."""

    text: str
    contents: tuple[tuple[int, int], ...]
    is_chat: bool


def render_text(text: str) -> Rendered:
    """A raw prompt: the caller owns it, so special tokens in it are parsed (as ``tokenizer(text)`` does)."""
    if not text:
        raise EmptyPromptError("the prompt is empty")
    return Rendered(text, (), is_chat=False)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies of the messages, contents as strings; typed errors for what is not a message."""
    if not messages:
        raise EmptyPromptError("the list of messages is empty")
    out: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise UsageError(f"message {index} is not a dict with 'role' and 'content': {message!r:.80}")
        if message["role"] not in ROLES:
            raise UsageError(f"message {index} has the unknown role {message['role']!r}", hint=f"known: {ROLES}")
        out.append({**message, "content": _content_text(index, message.get("content"))})
    return out


def _content_text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [p if isinstance(p, str) else p.get("text") for p in content if isinstance(p, (str, Mapping))]
        if len(parts) == len(content) and all(isinstance(p, str) for p in parts):
            return "\n\n".join(str(p) for p in parts)
    raise UsageError(
        f"message {index} has content of type {type(content).__name__}",
        hint="use a string or a list of text blocks; images and audio are not supported",
    )


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> Rendered:
    """Render through the tokenizer's chat template.

    Raises:
        TokenizerError: there is no chat template, or it refuses these messages (its own words are passed on).
    """
    checked = check_messages(messages)
    kwargs = {"add_generation_prompt": add_generation_prompt, **template_kwargs}
    if tools:
        kwargs["tools"] = tools
    text = _apply(tokenizer, checked, kwargs)
    if not text:
        raise EmptyPromptError("the chat template rendered these messages to nothing")
    return Rendered(text, _locate(tokenizer, checked, kwargs, text), is_chat=True)


def _apply(tokenizer: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise TokenizerError(
            "this tokenizer has no chat template", hint="pass a plain string prompt, or set tokenizer.chat_template"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
    except Exception as error:  # jinja raises many kinds; the template's own message is what helps
        raise TokenizerError(
            f"the chat template refuses these messages: {error}",
            hint="some templates know no system role or want user/assistant to alternate; merge or rename messages",
        ) from error


_MARKER = re.compile("\ue000(\\d+)\ue001")


def _marker(index: int) -> str:
    return f"\ue000{index}\ue001"


def _locate(
    tokenizer: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any], text: str
) -> tuple[tuple[int, int], ...]:
    marked = [{**m, "content": _marker(i)} if m["content"].strip() else m for i, m in enumerate(messages)]
    try:
        template = _apply(tokenizer, marked, kwargs)
    except TokenizerError:
        template = None
    found = None if template is None else _from_markers(template, messages, text)
    if found is not None:
        return found
    shown = [template is None or _marker(i) in template for i in range(len(messages))]
    bodies = [m["content"].strip() if there else "" for m, there in zip(messages, shown, strict=True)]
    return _by_search(bodies, text, _controls(tokenizer))


def _from_markers(template: str, messages: list[dict[str, Any]], text: str) -> tuple[tuple[int, int], ...] | None:
    """Ranges in ``text`` if replacing the markers by the contents (or what is left of them) reproduces it."""
    ranges: list[tuple[int, int]] = []
    at, cursor = 0, 0
    for marker in _MARKER.finditer(template):
        literal = template[cursor : marker.start()]
        body = None
        if text.startswith(literal, at) and int(marker[1]) < len(messages):
            at += len(literal)
            body = _body(messages[int(marker[1])]["content"], text, at)
        if body is None:
            return None
        ranges.append((at, at + len(body)))
        at += len(body)
        cursor = marker.end()
    return tuple(ranges) if text[at:] == template[cursor:] else None


def _body(content: str, text: str, at: int) -> str | None:
    """What of ``content`` stands at ``at``: all, trimmed, or without its first part (Qwen3 drops earlier thoughts)."""
    for whole in (content, content.strip()):
        if text.startswith(whole, at):
            return whole
    for whole in (content, content.rstrip()):
        for start in range(1, len(whole) + 1):
            if text.startswith(whole[start : start + 32], at) and text.startswith(whole[start:], at):
                return whole[start:]
    return None


def _by_search(bodies: Sequence[str], text: str, controls: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The places of ``bodies`` in order. One that is not there is the template's affair, unless it spells control
    tokens: nobody can tell then which of them are the template's own."""
    ranges: list[tuple[int, int]] = []
    cursor = 0
    for index, body in enumerate(bodies):
        where = text.find(body, cursor) if body else -1
        if where >= 0:
            ranges.append((where, where + len(body)))
            cursor = where + len(body)
        elif spelled := next((c for c in controls if c in body), None):
            raise TokenizerError(
                f"the chat template rewrites message {index}, which spells the control token {spelled}",
                hint="take control tokens out of the message, or use a template that shows contents as they are",
            )
    return tuple(ranges)


def _controls(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [str(token.content) for token in added.values() if token.special]


CANONICAL_SYSTEM = "You are a helpful assistant. Answer from the given context."
_CANONICAL_SPLIT = "\ue000body\ue001"


def canonical_head_text(tokenizer: Any) -> str:
    """A fixed neutral head in the model's own chat template, up to where the user's text would start.

    Without a template: nothing (a bare start token is added by the tokenizer). Dates are held still through the
    template's own ``date_string`` where it has one; the ids are frozen in the store's manifest in any case.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    user = {"role": "user", "content": _CANONICAL_SPLIT}
    for messages in ([{"role": "system", "content": CANONICAL_SYSTEM}, user], [user]):
        try:
            text = _apply(tokenizer, messages, {"add_generation_prompt": True, "date_string": "1 January 2025"})
        except TokenizerError:
            continue
        if _CANONICAL_SPLIT in text:
            return text.split(_CANONICAL_SPLIT)[0]
    return ""
