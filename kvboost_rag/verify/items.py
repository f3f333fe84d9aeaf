"""What is verified: prompts with their chunks, as the application would send them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag.engine.request import PromptInput, check_prompt
from kvboost_rag.errors import UsageError

SYSTEM = "Answer the question from the passages. If they do not hold the answer, say that you do not know."
SHAPES = 'an object has "question" and "passages", or "messages" (or "prompt") and "chunks"'
LINES = "one JSON object a line; " + SHAPES


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """A prompt and the chunk texts in it; ``question`` is for the report."""

    prompt: PromptInput
    chunks: tuple[str, ...]
    question: str = ""

    @classmethod
    def build(cls, value: VerifyItem | Mapping[str, Any], system: str = SYSTEM) -> VerifyItem:
        """From a mapping: ``question`` and ``passages`` (put together as ``kvboost-rag ask`` does), or ``messages`` or
        ``prompt`` with ``chunks``.

        Raises:
            UsageError: neither shape, or a field of the wrong type.
            EmptyPromptError: the prompt is empty.
        """
        if isinstance(value, VerifyItem):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(f"an item is an object, not {type(value).__name__}", hint=SHAPES)
        chunks = _texts(value, "passages" if "passages" in value else "chunks")
        question = str(value.get("question") or "")
        prompt = value.get("messages") or value.get("prompt")
        if prompt is None:
            if not question or not chunks:
                raise UsageError(f"an item with the fields {sorted(map(str, value))} has no prompt", hint=SHAPES)
            prompt = question_messages(question, chunks, system)
        return cls(check_prompt(prompt), chunks, question or _last_words(prompt))


def question_messages(question: str, passages: Sequence[str], system: str = SYSTEM) -> list[dict[str, str]]:
    """The prompt of a question with its passages."""
    user = {"role": "user", "content": "\n\n".join(passages) + f"\n\nQuestion: {question}"}
    return [{"role": "system", "content": system}, user] if system else [user]


def read_items(path: str | Path, limit: int | None = None, system: str = SYSTEM) -> list[VerifyItem]:
    """Items of a jsonl file, at most ``limit``.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is no item (named by its number).
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=LINES) from error
    items: list[VerifyItem] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also split inside a JSON string
        if not line.strip() or (limit is not None and len(items) >= limit):
            continue
        try:
            items.append(VerifyItem.build(json.loads(line), system))
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error.message}", hint=error.hint or LINES) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: {error}", hint=LINES) from error
    if not items:
        raise UsageError(f"{path} holds no question", hint=LINES)
    return items


def _texts(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = value.get(name) or ()
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes) or not all(isinstance(t, str) for t in texts):
        raise UsageError(f"{name!r} must be a list of texts", hint=SHAPES)
    return tuple(texts)


def _last_words(prompt: PromptInput) -> str:
    """Something to recognise a prompt by."""
    if isinstance(prompt, str):
        return prompt[-200:].strip()
    last = prompt[-1] if prompt else ""
    return str(last.get("content") or "")[-200:].strip() if isinstance(last, Mapping) else ""
