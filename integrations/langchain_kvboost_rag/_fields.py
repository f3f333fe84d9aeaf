"""The fields that ``ChatKVBoost`` and ``KVBoostLLM`` share, and the engine behind them."""

from __future__ import annotations

import json
import logging
import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from kvboost_rag import KVBoost, Repair, SharedEngine
from kvboost_rag.errors import UsageError

log = logging.getLogger("langchain_kvboost_rag")
Self = TypeVar("Self", bound="KVBoostFields")

DEFAULT_MAX_TOKENS = 256
SMOLLM2_WINDOW = 8192
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
# What frameworks and provider-neutral code pass along, and what means nothing to a local engine.
NO_MEANING = {
    "api_key", "base_url", "organization", "stream", "stream_usage", "parallel_tool_calls", "strict", "cache_control",
    "user", "n", "ls_structured_output_format", "stream_options", "metadata", "tags", "model_kwargs",
    "reasoning_effort",
}  # fmt: skip


class KVBoostFields(BaseModel):
    """Settings of the model, of sampling and of reuse.

    One loaded model serves every object with the same ``model``, ``store``, ``dtype``, ``device``, ``revision``:
    copies, bound and rebuilt objects share it; the last one to go frees it. It is loaded at first use.
    """

    model: str = "smollm2"
    """Hub id, local folder, ``.gguf`` file, or ``"smollm2"`` (the small embedded default)."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """Most new tokens per answer."""
    stop_sequences: list[str] | None = Field(default=None, alias="stop")
    """Strings that end an answer; they are not part of it. Those of a call are used instead."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    repetition_penalty: float = 1.0
    seed: int | None = None
    reuse: Literal["chunks", "prefix", "off"] = "chunks"
    """``"chunks"``, ``"prefix"`` (exact only) or ``"off"`` (plain prefill)."""
    repair: str | Repair = "balanced"
    """``"fast"``, ``"balanced"``, ``"faithful"`` or a :class:`kvboost_rag.Repair`."""
    store: Any = "~/.cache/kvboost-rag"
    """Folder, ``"memory"``, None (off) or a store object."""
    dtype: Any = "auto"
    device: Any = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of ``KVBoost`` (``salt``, ``filler_tokens``, ``disk_bytes``, …)."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template (``enable_thinking``, ``date_string``, …)."""
    timeout: float | None = None
    """Seconds after which an answer is given up with ``TimeoutError``."""
    max_retries: int = 0
    """Accepted for the sake of code that sets it; a local model has nothing to retry."""
    streaming: bool | None = None
    """True: tokens go to callbacks also when ``invoke`` is called. False: ``stream`` gives the answer in one piece."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An engine that exists already (:class:`kvboost_rag.KVBoost`): the fields about loading are not used then."""

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = {*cls.model_fields, "stop"}
            for name in (n for n in values if n not in known and n not in NO_MEANING):
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                warnings.warn(f"{cls.__name__} has no field {name!r}; it is ignored{hint}", stacklevel=4)
        return values

    @model_validator(mode="after")
    def _resolve_engine_reference(self: Self) -> Self:
        reference = self.engine
        if isinstance(reference, KVBoost):
            if "model" in self.model_fields_set and self.model != reference.adapter.name:
                raise _two_models(reference.adapter.name, self.model)
            reference = SharedEngine.of(reference)
        elif reference is None:
            reference = self._reference(None, self.model)
        elif not isinstance(reference, SharedEngine):
            raise UsageError(f"engine must be a KVBoost, not {type(reference).__name__}")
        elif not reference.adopted:  # a rebuilt object: its fields may ask for another engine than the original's
            reference = self._reference(reference, self.model)
        elif "model" in self.model_fields_set and self.model != reference.name:
            raise _two_models(reference.name, self.model)
        # Past pydantic's own bookkeeping: neither is a value that the caller set.
        self.__dict__["engine"] = reference
        self.__dict__["model"] = reference.name if reference.adopted else self.model
        return self

    def _reference(self, known: SharedEngine | None, model: str) -> SharedEngine:
        request: dict[str, Any] = {
            "store": self.store,
            "dtype": self.dtype,
            "device": self.device,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            **self.engine_options,
        }
        return known.variant(model, **request) if known else SharedEngine(model, **request)

    def engine_for(self, model: str | None = None) -> KVBoost:
        """The engine of this object, or of another model with the same settings; loaded if need be."""
        if model is None or model == self.model:
            engine: KVBoost = self.engine.get()
            return engine
        if self.engine.adopted:
            raise _two_models(self.model, model)
        return self._reference(self.engine, model).get()

    def window(self) -> int | None:
        """Tokens that prompt and answer may have together, as far as that is known without loading the model."""
        if self.engine.loaded:
            return self.engine_for().adapter.max_tokens
        if self.model == "smollm2":
            return SMOLLM2_WINDOW
        try:
            config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
            return int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def call_options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Options of one ``KVBoost.generate`` call: the fields, overridden by what the call names."""
        options: dict[str, Any] = {name: kwargs.get(name, getattr(self, name)) for name in SAMPLING}
        limit = kwargs.get("max_tokens", kwargs.get("max_new_tokens", self.max_tokens))
        options["max_new_tokens"] = DEFAULT_MAX_TOKENS if limit is None else limit
        options["stop"] = [s for s in (stop if stop is not None else self.stop_sequences or []) if s]
        options["reuse"] = kwargs.get("reuse", self.reuse)
        options["repair"] = kwargs.get("repair", self.repair)
        if isinstance(kwargs.get("logits_processors"), (list, tuple)):
            options["logits_processors"] = list(kwargs["logits_processors"])
        return options

    def settings(self) -> dict[str, Any]:
        """What may change an answer: the identity of this object for response caches and traces."""
        repair = self.repair.label if isinstance(self.repair, Repair) else self.repair
        named = ("model", "revision", "temperature", "max_tokens", "top_p", "top_k", "repetition_penalty", "seed")
        out: dict[str, Any] = {name: getattr(self, name) for name in named}
        out |= {"dtype": str(self.dtype), "stop_sequences": self.stop_sequences, "reuse": self.reuse, "repair": repair}
        out["engine_options"] = {k: v for k, v in sorted(self.engine_options.items()) if isinstance(v, (str, int))}
        out["template_kwargs"] = dict(sorted(self.template_kwargs.items()))
        return out

    def token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` by the model's own tokenizer, without special tokens around it."""
        return list(self.engine_for().tokenizer(text, add_special_tokens=False)["input_ids"])


def _two_models(held: str, asked: str) -> UsageError:
    return UsageError(
        f"engine= holds {held!r}, but model={asked!r} is asked for",
        hint="leave out one of them, or build another object",
    )


def warn_unknown_call_options(kwargs: dict[str, Any], known: set[str]) -> None:
    """One log line for options of a call that nothing here understands."""
    unknown = [k for k in kwargs if k not in known and k not in NO_MEANING]
    if unknown:
        log.warning("options of the call that mean nothing here: %s", ", ".join(sorted(unknown)))
