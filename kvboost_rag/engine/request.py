"""One request's options, checked at the border."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from kvboost_rag.config import Repair, Reuse, Sampling, check_reuse, resolve_repair, unknown_option
from kvboost_rag.engine.decode import CancelToken
from kvboost_rag.errors import EmptyPromptError, UsageError

PromptInput = str | Sequence[Mapping[str, Any]] | Sequence[int]

OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
    "stop",
    "chunks",
    "reuse",
    "repair",
    "tools",
    "cancel",
    "logits_processors",
    "template_kwargs",
)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it; every field valid."""

    prompt: PromptInput
    reuse: Reuse
    repair: Repair
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()
    tools: tuple[Any, ...] = ()
    cancel: CancelToken = field(default_factory=CancelToken)
    logits_processors: tuple[Any, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, prompt: PromptInput, *, reuse: Reuse, repair: Repair, options: Mapping[str, Any]) -> Request:
        """Check ``options`` (see :data:`OPTIONS`) against the engine's defaults ``reuse`` and ``repair``.

        Raises:
            UsageError: an unknown option, a wrong type or value.
            EmptyPromptError: nothing to answer.
        """
        for name in options:
            if name not in OPTIONS:
                raise unknown_option("option", name, OPTIONS)
        given = {k: v for k, v in options.items() if v is not None}
        sampling = {k: given[k] for k in ("temperature", "top_p", "top_k", "repetition_penalty", "seed") if k in given}
        return cls(
            prompt=check_prompt(prompt),
            reuse=check_reuse(given.get("reuse", reuse)),
            repair=resolve_repair(given.get("repair", repair)),
            max_new_tokens=_positive("max_new_tokens", given.get("max_new_tokens", 256)),
            sampling=Sampling(**sampling),
            stop=_strings("stop", given.get("stop", ())),
            chunks=_strings("chunks", given.get("chunks", ())),
            tools=_items("tools", given.get("tools", ())),
            cancel=_cancel(given.get("cancel")),
            logits_processors=_items("logits_processors", given.get("logits_processors", ())),
            template_kwargs=_mapping("template_kwargs", given.get("template_kwargs", {})),
        )


def check_prompt(prompt: Any) -> PromptInput:
    """A string, a list of messages or a list of token ids; anything else is a clear error."""
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPromptError("the prompt is empty")
        return prompt
    if isinstance(prompt, (Mapping, bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise UsageError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}",
            hint='a single message goes into a list: [{"role": "user", "content": ...}]',
        )
    if not prompt:
        raise EmptyPromptError("the prompt is an empty list")
    ints = [_is_id(p) for p in prompt]
    if any(ints) and not all(ints):
        raise UsageError("a list prompt holds either messages or token ids, not both")
    return prompt


def is_token_ids(prompt: PromptInput) -> bool:
    """Whether a checked prompt is a list of token ids."""
    return not isinstance(prompt, str) and _is_id(prompt[0])


def _is_id(value: object) -> bool:
    """An integer of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _cancel(value: Any) -> CancelToken:
    if value is None:
        return CancelToken()
    if not isinstance(value, CancelToken):
        raise UsageError(f"cancel must be a CancelToken, got {value!r:.80}", hint="from kvboost_rag import CancelToken")
    return value


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list, got {value!r:.80}")
    return tuple(value)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a dict, got {value!r:.80}")
    return dict(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        items = tuple(value)
    except TypeError:
        items = (None,)
    if not all(isinstance(item, str) for item in items):
        raise UsageError(f"{name} must be a string or a list of strings, got {value!r:.80}")
    return items
