"""One loaded model per process, however many LLM objects name it.

Frameworks copy, rebuild and pickle their LLM objects; a model must not be loaded again each time. A
:class:`SharedEngine` is what such an object holds: a reference that may be copied freely and loads at first use.
Engines are held weakly: when the last reference goes, the model's memory is free again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from kvboost_rag.api import DEFAULT_STORE, KVBoost
from kvboost_rag.errors import ModelNotFoundError
from kvboost_rag.store.base import BlockStore

_LOCK = threading.RLock()
_ENGINES: WeakValueDictionary[str, KVBoost] = WeakValueDictionary()  # by everything that was asked for
_MODELS: WeakValueDictionary[str, KVBoost] = WeakValueDictionary()  # by model alone: any engine that has it loaded


class SharedEngine:
    """A reference to an engine; equal requests in one process get the same engine, and other stores over the same
    model share its weights. Copies (deep ones too) are the object itself; a pickle carries the request, never weights.

    ``model`` … ``options`` are those of :meth:`KVBoost.from_pretrained`, but ``reuse`` and ``repair``: these are
    chosen per call.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        store: str | Path | BlockStore | None = DEFAULT_STORE,
        dtype: Any = "auto",
        device: Any = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._weights: dict[str, Any] = {
            "name": str(model),
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "revision": revision,
            "trust_remote_code": trust_remote_code,
        }
        self._store = store
        self._options = options
        self._adopted = ""
        self._engine: KVBoost | None = None
        self._variants: dict[str, SharedEngine] = {}

    @classmethod
    def of(cls, engine: KVBoost) -> SharedEngine:
        """A reference to an engine that exists already."""
        shared = cls(engine.adapter.name)
        shared._adopted = f"adopted:{os.getpid()}:{id(engine)}"
        shared._engine = engine
        with _LOCK:
            _ENGINES[shared._adopted] = engine
        return shared

    @property
    def name(self) -> str:
        """The model that was asked for."""
        return str(self._weights["name"])

    @property
    def adopted(self) -> bool:
        """Whether the engine was handed over as an object (:meth:`of`)."""
        return bool(self._adopted)

    def variant(self, model: str | Path, **request: Any) -> SharedEngine:
        """The reference for another request: this one if it asks for the same, else one that lives as long as this
        one, so that objects that are rebuilt for every call do not load again and again."""
        other = SharedEngine(model, **request)
        if other._key() == self._key():
            return self
        return self._variants.setdefault(other._key(), other)

    @property
    def loaded(self) -> bool:
        """Whether :meth:`get` returns at once."""
        return self._engine is not None or self._key() in _ENGINES

    def get(self) -> KVBoost:
        """The engine; loads the model if no living engine has it.

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError, StoreError: see :meth:`KVBoost.from_pretrained`.
        """
        if self._engine is None:
            with _LOCK:
                self._engine = self._find(_ENGINES, self._key(), self._make)
        return self._engine

    @staticmethod
    def _find(known: WeakValueDictionary[str, KVBoost], key: str, make: Callable[[], KVBoost]) -> KVBoost:
        engine = known.get(key)
        if engine is None:
            engine = make()
            known[key] = engine
        return engine

    def _key(self) -> str:
        return self._adopted or repr((self._weights, _store_key(self._store), sorted(self._options.items())))

    def _make(self) -> KVBoost:
        if self._adopted:
            raise ModelNotFoundError(
                f"the engine of {self._weights['name']} was handed over as an object, and that object is gone",
                hint="pass engine=… again, or name a model that can be loaded",
            )
        # reuse is a matter of each call; "off" here only means that an unproved architecture is not refused yet.
        options = {"store": self._store, "reuse": "off", **self._options}
        with_model = _MODELS.get(repr(self._weights))
        if with_model is None:
            engine = KVBoost.from_pretrained(**self._weights, **options)
        else:
            adapter = with_model.adapter
            engine = KVBoost(adapter.model, adapter.tokenizer, name=adapter.name, **options)
            engine.adapter.lock = adapter.lock  # still one forward at a time
        _MODELS[repr(self._weights)] = engine
        return engine

    def __copy__(self) -> SharedEngine:
        return self

    def __deepcopy__(self, memo: object) -> SharedEngine:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_variants": {}}

    def __repr__(self) -> str:
        return f"SharedEngine({self._weights['name']!r}, {'loaded' if self.loaded else 'not loaded'})"


def _store_key(store: str | Path | BlockStore | None) -> str:
    if isinstance(store, BlockStore):
        return f"object:{id(store)}"
    if store is None or store == "memory":
        return str(store)
    return os.path.realpath(os.path.expanduser(store))
