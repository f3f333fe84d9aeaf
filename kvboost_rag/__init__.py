"""kvboost_rag: skip prefill for retrieved chunks, and know what it costs.

Public names are loaded on first use, so that ``import kvboost_rag`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CallFilter",
    "CancelToken",
    "Corpus",
    "KVBoost",
    "KVBoostError",
    "ParsedAnswer",
    "Piece",
    "Repair",
    "Report",
    "Result",
    "Score",
    "SharedEngine",
    "SourceChunk",
    "SplitOptions",
    "WarmReport",
    "__version__",
    "close_objects",
    "fit_messages",
    "json_schema_processor",
    "parse_native",
    "parse_tool_calls",
    "tool_call_schema",
]

_HOME = {
    "CallFilter": "kvboost_rag.toolcalls",
    "CancelToken": "kvboost_rag.engine.decode",
    "Corpus": "kvboost_rag.warmup",
    "KVBoost": "kvboost_rag.api",
    "KVBoostError": "kvboost_rag.errors",
    "ParsedAnswer": "kvboost_rag.toolcalls",
    "Piece": "kvboost_rag.engine.result",
    "Repair": "kvboost_rag.config",
    "Report": "kvboost_rag.engine.report",
    "Result": "kvboost_rag.engine.result",
    "Score": "kvboost_rag.engine.result",
    "SharedEngine": "kvboost_rag.registry",
    "SourceChunk": "kvboost_rag.warmup",
    "SplitOptions": "kvboost_rag.warmup",
    "WarmReport": "kvboost_rag.warmup",
    "close_objects": "kvboost_rag.constrain",
    "fit_messages": "kvboost_rag.engine.fit",
    "json_schema_processor": "kvboost_rag.constrain",
    "parse_native": "kvboost_rag.toolcalls",
    "parse_tool_calls": "kvboost_rag.toolcalls",
    "tool_call_schema": "kvboost_rag.constrain",
}

if TYPE_CHECKING:
    from kvboost_rag.api import KVBoost as KVBoost
    from kvboost_rag.config import Repair as Repair
    from kvboost_rag.constrain import close_objects as close_objects
    from kvboost_rag.constrain import json_schema_processor as json_schema_processor
    from kvboost_rag.constrain import tool_call_schema as tool_call_schema
    from kvboost_rag.engine.decode import CancelToken as CancelToken
    from kvboost_rag.engine.fit import fit_messages as fit_messages
    from kvboost_rag.engine.report import Report as Report
    from kvboost_rag.engine.result import Piece as Piece
    from kvboost_rag.engine.result import Result as Result
    from kvboost_rag.engine.result import Score as Score
    from kvboost_rag.errors import KVBoostError as KVBoostError
    from kvboost_rag.registry import SharedEngine as SharedEngine
    from kvboost_rag.toolcalls import CallFilter as CallFilter
    from kvboost_rag.toolcalls import ParsedAnswer as ParsedAnswer
    from kvboost_rag.toolcalls import parse_native as parse_native
    from kvboost_rag.toolcalls import parse_tool_calls as parse_tool_calls
    from kvboost_rag.warmup import Corpus as Corpus
    from kvboost_rag.warmup import SourceChunk as SourceChunk
    from kvboost_rag.warmup import SplitOptions as SplitOptions
    from kvboost_rag.warmup import WarmReport as WarmReport


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvboost_rag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
