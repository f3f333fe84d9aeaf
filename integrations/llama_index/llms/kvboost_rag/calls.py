"""From fields and keyword arguments to the engine's options."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from llama_index.llms.kvboost_rag.responses import Call

from kvboost_rag import KVBoost, close_objects
from kvboost_rag.errors import ContextLengthError, MissingExtraError, UnknownOptionError

log = logging.getLogger("kvboost_rag")

OPTIONS = (
    "temperature", "max_tokens", "max_new_tokens", "top_p", "top_k", "repetition_penalty", "seed", "stop", "reuse",
    "repair", "chunks", "tools", "cancel", "logits_processors", "template_kwargs",
)  # fmt: skip
SLACK = 16  # tokens by which counting over the whole text and span by span may differ


def build_options(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options: ``given`` over ``defaults``; None means "not given".

    Raises:
        UnknownOptionError: an option that does not exist.
    """
    unknown = sorted(given.keys() - set(OPTIONS))
    if unknown:
        raise UnknownOptionError(f"unknown option {unknown[0]!r}", hint=f"known: {', '.join(OPTIONS)}")
    options = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    most = options.pop("max_tokens")
    options.setdefault("max_new_tokens", most)
    return options


def shrunk(call: Call, error: ContextLengthError) -> dict[str, Any]:
    """Options with as many new tokens as still fit, if their number was a default.

    Raises:
        ContextLengthError: the prompt alone is too long, or the number was asked for in this very call.
    """
    shared = {k: v for k, v in call.options.items() if k in ("tools", "template_kwargs")}
    room = call.engine.adapter.max_tokens - call.engine.count_tokens(call.prompt, **shared) - SLACK
    if call.may_shrink and room > 0:
        log.warning("only %d of %d new tokens fit into the window", room, call.options["max_new_tokens"])
        return {**call.options, "max_new_tokens": room}
    hint = "retrieve fewer nodes, or call llm.set_global_tokenizer() so that LlamaIndex counts this model's tokens"
    raise ContextLengthError(error.message, hint=hint) from error


def json_processors(engine: KVBoost, schema: Mapping[str, Any]) -> list[Any]:
    """Logits processors that allow only JSON of ``schema``, objects closed; none where llguidance is missing."""
    try:
        return [engine.json_processor(close_objects(schema))]
    except MissingExtraError as error:
        log.warning("no constrained decoding, the answer may be no valid JSON: %s", error)
        return []


def safe_store(store: str | None) -> str | None:
    """A store's address without user and password."""
    return re.sub(r"(?<=://)[^/@]*@", "", store) if store else store
