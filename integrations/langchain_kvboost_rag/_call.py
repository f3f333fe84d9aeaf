"""One chat call, ready to run: the fitted messages, the engine's options, and how the answer is to be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvboost_rag import CancelToken, KVBoost, fit_messages, tool_call_schema
from kvboost_rag.errors import UnknownOptionError, UsageError
from langchain_kvboost_rag._fields import SAMPLING, KVBoostFields, warn_unknown_call_options
from langchain_kvboost_rag._known import chunks_in
from langchain_kvboost_rag._messages import ChatInput

_KNOWN = {
    *SAMPLING, "max_tokens", "max_new_tokens", "reuse", "repair", "logits_processors", "chunks", "model", "timeout",
    "template_kwargs", "tools", "tool_choice", "response_format",
}  # fmt: skip


@dataclass
class ChatCall:
    """``forced``: the answer is a tool call by its grammar. ``tools``: what was offered, in OpenAI's form."""

    engine: KVBoost
    model_name: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: bool = False
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def prompt_text(self) -> str:
        """The prompt as rendered (for parsers that must know what the template wrote before the answer)."""
        shape = {k: v for k, v in self.options.items() if k in ("tools", "template_kwargs")}
        return self.engine.render(self.messages, **shape)


class Deadline:
    """Cancels a request after some seconds; used as a context manager around it."""

    def __init__(self, seconds: float | None) -> None:
        self.token = CancelToken()
        self.seconds = seconds
        self.passed = False
        self._timer: threading.Timer | None = None

    def _expire(self) -> None:
        self.passed = True
        self.token.cancel()

    def __enter__(self) -> Deadline:
        if self.seconds is not None:
            self._timer = threading.Timer(self.seconds, self._expire)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def check(self, finish_reason: str) -> None:
        """Raises TimeoutError if the answer ended because time was up."""
        if self.passed and finish_reason == "cancelled":
            raise TimeoutError(f"no complete answer within {self.seconds} seconds (timeout=…)")


def prepare_chat(
    llm: KVBoostFields, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
) -> ChatCall:
    """Everything that happens before the model runs. Loads the model if need be: may take long.

    Raises:
        UsageError: messages or options that make no sense. TokenizerError: the chat template refuses them.
        MissingExtraError: a tool or a schema is forced and llguidance is missing.
    """
    warn_unknown_call_options(kwargs, _KNOWN)
    engine = llm.engine_for(kwargs.get("model"))
    read = ChatInput(messages)
    tools = [convert_to_openai_tool(t) for t in kwargs.get("tools") or ()]
    choice = normal_choice(kwargs.get("tool_choice"), tools)
    offered = [] if choice == "none" else tools
    schema = response_schema(kwargs.get("response_format"))
    if schema is not None and schema != ANY_OBJECT:
        read.messages = _told(read.messages, schema)
    fitted, native = fit_messages(engine.tokenizer, read.messages, offered)
    options = llm.call_options(stop, kwargs)
    options["template_kwargs"] = {**llm.template_kwargs, **(kwargs.get("template_kwargs") or {})}
    if native:
        options["tools"] = native
    if options["reuse"] == "chunks":
        named = kwargs.get("chunks") or ()
        options["chunks"] = chunks_in(engine, [m["content"] for m in fitted], read.documents, named)
    grammar = _grammar(offered, choice, schema)
    if grammar is not None:
        options["logits_processors"] = [engine.json_processor(grammar), *options.get("logits_processors", ())]
    deadline = Deadline(kwargs.get("timeout", llm.timeout))
    options["cancel"] = deadline.token
    name = str(kwargs.get("model") or llm.model)
    return ChatCall(engine, name, fitted, options, offered, _forces(choice), deadline)


def _forces(choice: str | None) -> bool:
    return choice not in (None, "auto", "none")


def _grammar(tools: list[dict[str, Any]], choice: str | None, schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the answer must follow: a call of one or of any tool, a schema, or either of them; None for free text."""
    if choice is not None and _forces(choice):
        return tool_call_schema(tools, None if choice == "any" else choice)
    if schema is not None and tools:
        return tool_call_schema(tools, or_schema=schema)
    return schema


def normal_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """``tool_choice`` in any provider's spelling as None, ``"auto"``, ``"none"``, ``"any"`` or a tool's name."""
    names = [t["function"]["name"] for t in tools]
    if choice is None or choice is False:
        return None
    if choice is True or choice == "required":
        choice = "any"
    if isinstance(choice, Mapping):
        inner = choice.get("function")
        choice = inner.get("name") if isinstance(inner, Mapping) else choice.get("name", choice.get("type"))
    if choice in ("auto", "none", "any") or choice in names:
        return str(choice)
    raise UnknownOptionError(
        f"tool_choice {choice!r} is neither a tool nor a mode",
        hint=f"tools: {', '.join(names) or 'none'}; modes: auto, none, any, required",
    )


ANY_OBJECT: dict[str, Any] = {"type": "object"}


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema of a ``response_format`` in OpenAI's form, or a schema as it is."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        from langchain_kvboost_rag._structured import json_schema_of

        return json_schema_of(response_format)
    kind = response_format.get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "text":
        return None
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        if not isinstance(inner.get("schema"), Mapping):
            raise UsageError('response_format "json_schema" without a schema')
        return dict(inner["schema"])
    return dict(response_format)


def _told(messages: list[dict[str, Any]], schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tell the model what the grammar will hold it to."""
    text = f"Answer with JSON that follows this schema, and nothing else:\n{json.dumps(schema, ensure_ascii=False)}"
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
