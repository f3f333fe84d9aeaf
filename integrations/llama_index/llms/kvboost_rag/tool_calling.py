"""The tool half of the LLM: requests with tools, and tool calls of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.llms.kvboost_rag.tools import Spec

from kvboost_rag.errors import UsageError


class ToolCallingLLM(FunctionCallingLLM):
    """``chat_with_tools`` and its kin over ``chat(..., tools=..., tool_choice=...)``."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[Any],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        specs: list[Spec] = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(
                ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
            )
        choice = tool_choice if tool_choice is not None else "required" if tool_required and specs else None
        return {
            "messages": messages,
            "tools": specs,
            "tool_choice": choice,
            "allow_parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of a response.

        Raises:
            UsageError: there are none, and ``error_on_no_tool_call`` is set.
        """
        blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            cut = isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length"
            raise UsageError(
                f"the model called no tool, it answered: {(response.message.content or '')[:200]!r}",
                hint="the answer was cut off, raise max_tokens" if cut else "pass tool_required=True to force a call",
            )
        return [
            ToolSelection(tool_id=b.tool_call_id or "", tool_name=b.tool_name, tool_kwargs=dict(b.tool_kwargs))  # type: ignore[arg-type]
            for b in blocks
        ]
