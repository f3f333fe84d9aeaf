"""Constrained decoding: every token that would leave a JSON schema is masked before sampling.

The grammar engine is llguidance (MIT, no dependencies, one wheel for every Python, a millisecond per schema); it is an
optional extra. The result is an ordinary transformers logits processor::

    processor = json_schema_processor(engine.tokenizer, schema, engine.vocab_size)
    engine.generate(messages, logits_processors=[processor])

A schema makes the *form* certain, not the sense; and an answer that is cut off by ``max_new_tokens`` is not complete.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor

from kvboost_rag.errors import MissingExtraError, UnknownOptionError, UsageError

log = logging.getLogger(__name__)

PIP = "pip install 'kvboost-rag[structured]'"
# One space after "," and ":" as json.dumps writes it, and none elsewhere: small models lose themselves in white space.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_TOKENIZERS: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


def json_schema_processor(
    tokenizer: Any,
    schema: Mapping[str, Any],
    vocab_size: int | None = None,
    *,
    eos_ids: Sequence[int] | None = None,
) -> JsonSchemaProcessor:
    """A logits processor that lets through only JSON text of ``schema``, and then the end of the sequence.

    Build one per request: it follows the answer token by token. ``vocab_size`` is the width of the model's logits
    (ids beyond the tokenizer's are masked anyway). ``eos_ids`` default to the tokenizer's own. Keywords that the
    grammar engine does not know are left out of the grammar, with a log line.

    Raises:
        MissingExtraError: llguidance is not installed. UsageError: not a usable JSON schema.
    """
    module = _llguidance()
    matcher = _matcher(module, tokenizer, schema, vocab_size, eos_ids)
    stop = tuple(int(i) for i in (eos_ids or [tokenizer.eos_token_id]))
    return JsonSchemaProcessor(matcher, stop)


class JsonSchemaProcessor(LogitsProcessor):
    """``(input_ids [1, n], scores [1, vocab]) → scores``, forbidden tokens at minus infinity. Serves one request."""

    def __init__(self, matcher: Any, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos = list(eos_ids)
        self._seen: int | None = None  # length of input_ids at the last call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._follow(input_ids)
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self._matcher.is_stopped():
            allowed[self._eos] = True
        else:
            bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            n = min(len(bias), len(allowed))
            allowed[:n] = bias[:n] > 0
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _follow(self, input_ids: torch.Tensor) -> None:
        """Feed the grammar what was sampled since the last call."""
        n = input_ids.shape[-1]
        if input_ids.shape[0] != 1 or (self._seen is not None and n != self._seen + 1):
            raise UsageError("a JSON schema processor serves one request", hint="build one per request")
        if self._seen is not None and not self._matcher.is_stopped():
            token = int(input_ids[0, -1])
            if not self._matcher.consume_token(token):
                raise UsageError(f"token {token} leaves the schema: {self._matcher.get_error()}")
        self._seen = n


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise MissingExtraError("constrained decoding needs the package llguidance", hint=PIP) from error
    return llguidance


def _matcher(
    module: Any, tokenizer: Any, schema: Mapping[str, Any], vocab_size: int | None, eos_ids: Sequence[int] | None
) -> Any:
    if not isinstance(schema, Mapping):
        raise UsageError(f"a JSON schema is a dict, not {type(schema).__name__}")
    try:
        grammar = module.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_STYLE)
    except (ValueError, TypeError) as error:
        raise UsageError(f"not a JSON schema: {error}") from error
    matcher = module.LLMatcher(_ll_tokenizer(module, tokenizer, vocab_size, eos_ids), grammar, log_level=0)
    if matcher.is_error():
        raise UsageError(f"not a usable JSON schema: {matcher.get_error()[:300]}")
    for warning in matcher.get_grammar_warnings():
        _note(str(warning))
    return matcher


@lru_cache(maxsize=256)
def _note(warning: str) -> None:
    log.warning("the JSON schema is enforced but for: %s", warning)


def _ll_tokenizer(module: Any, tokenizer: Any, vocab_size: int | None, eos_ids: Sequence[int] | None) -> Any:
    """llguidance's own view of the tokenizer; half a second to build, hence remembered."""
    n = max(vocab_size or 0, len(tokenizer))
    stop = tuple(int(i) for i in (eos_ids or [tokenizer.eos_token_id]))
    known = _TOKENIZERS.setdefault(tokenizer, {})
    if (n, stop) not in known:
        known[(n, stop)] = module.hf.from_tokenizer(
            tokenizer, n_vocab=n, eos_token=list(stop), slices=module.LLTokenizer.json_slices()
        )
    return known[(n, stop)]


def tool_call_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, or_schema: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The schema of ``{"name": …, "arguments": {…}}`` for OpenAI-style ``tools`` (or for the one called ``name``).

    Objects that list their properties are closed, so that a small model does not invent more. ``or_schema`` is a
    final answer that may come instead of a call.

    Raises:
        UnknownOptionError: no tool has this name. UsageError: no tools.
    """
    functions = [dict(tool.get("function", tool)) for tool in tools]
    names = [str(f.get("name")) for f in functions]
    if name is not None and name not in names:
        raise UnknownOptionError(f"no tool is called {name!r}", hint=f"known: {', '.join(names) or 'none'}")
    chosen = [f for f in functions if name is None or f.get("name") == name]
    if not chosen:
        raise UsageError("a tool call is forced, but there are no tools", hint="bind at least one tool")
    shared: dict[str, Any] = {}
    branches = [_call_branch(f, index, shared) for index, f in enumerate(chosen)]
    if or_schema is not None:
        branches.append(_hoist(dict(or_schema), "answer", shared))
    root: dict[str, Any] = {"anyOf": branches} if len(branches) > 1 else dict(branches[0])
    return {**root, "$defs": shared} if shared else root


def _call_branch(function: Mapping[str, Any], index: int, shared: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    arguments = _hoist(close_objects(dict(parameters)), f"tool{index}", shared)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _hoist(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Move local definitions to the common root under a name of their own, since ``#`` now means that root."""

    def moved(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {k: _renamed(v, prefix) if k == "$ref" else moved(v) for k, v in node.items()}
        return [moved(item) for item in node] if isinstance(node, list) else node

    out: dict[str, Any] = moved({k: v for k, v in schema.items() if k not in ("$defs", "definitions")})
    for place in ("$defs", "definitions"):
        for name, definition in (schema.get(place) or {}).items():
            shared[f"{prefix}.{name}"] = moved(definition)
    return out


def _renamed(reference: Any, prefix: str) -> Any:
    for place in ("#/$defs/", "#/definitions/"):
        if isinstance(reference, str) and reference.startswith(place):
            return f"#/$defs/{prefix}.{reference.removeprefix(place)}"
    return reference


def close_objects(schema: Any) -> Any:
    """``additionalProperties: false`` for every object that lists its properties and says nothing about others."""
    if isinstance(schema, list):
        return [close_objects(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # Inside allOf each part sees only its own properties: closing one would forbid the others'.
    out = {k: v if k in ("allOf", "enum", "const", "default", "examples") else _closed(k, v) for k, v in schema.items()}
    if "properties" in out and "allOf" not in out:
        out.setdefault("additionalProperties", False)
    return out


def _closed(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: close_objects(item) for name, item in value.items()}
    return close_objects(value)
