"""Structured output: schema to grammar on the way in, JSON to objects on the way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvboost_rag import close_objects
from kvboost_rag.errors import UnknownOptionError, UsageError

if TYPE_CHECKING:
    from langchain_kvboost_rag.chat_model import ChatKVBoost

METHODS = ("json_schema", "function_calling", "json_mode")


def json_schema_of(schema: Any, *, strict: bool | None = True) -> dict[str, Any]:
    """The JSON schema of a Pydantic class, TypedDict, function, tool or schema. Unless ``strict=False``, objects that
    list their properties may have no others."""
    out: dict[str, Any] = convert_to_json_schema(schema)
    return out if strict is False else close_objects(out)


def structured_output(
    llm: ChatKVBoost, schema: Any, method: str, include_raw: bool, strict: bool | None, tools: Any = None
) -> Runnable[Any, Any]:
    """``with_structured_output``: a bound model and the parser behind it."""
    if method not in METHODS:
        raise UnknownOptionError(f"unknown method {method!r}", hint=f"known: {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise UsageError(f"method={method!r} needs a schema")
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    bound: Runnable[Any, Any]
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = llm.bind_tools([schema], tool_choice=name, ls_structured_output_format=traced)
    else:
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            inner = {"name": "answer", "schema": json_schema_of(schema, strict=strict)}
            form = {"type": "json_schema", "json_schema": inner}
        bound = llm.bind(response_format=form, ls_structured_output_format=traced)
    parser = RunnableGenerator(_complete, _acomplete) | _parser(schema, method)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _parser(schema: Any, method: str) -> Runnable[Any, Any]:
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method != "function_calling":
        return PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    if is_class:
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _complete(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Message chunks as they come; an answer that was cut off is an error with its reason, not a parser's riddle."""
    for message in messages:
        yield _whole(message)


async def _acomplete(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _whole(message)


def _whole(message: AIMessage) -> AIMessage:
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "the JSON answer is not complete: it was cut off by max_tokens; raise max_tokens, or bound strings and "
            "lists in the schema (maxLength, maxItems)",
            llm_output=str(message.text),
        )
    return message
