"""The LLM's fields, its engine, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import BaseComponent
from llama_index.core.utils import set_global_tokenizer
from llama_index.llms.kvboost_rag.calls import build_options, safe_store
from llama_index.llms.kvboost_rag.messages import to_dicts
from llama_index.llms.kvboost_rag.retrieved import RetrievedTexts, watch_retrievals
from llama_index.llms.kvboost_rag.structured import StructuredOutputLLM

from kvboost_rag import KVBoost, Repair, SharedEngine, fit_messages


class ConfiguredLLM(StructuredOutputLLM):
    """Everything of :class:`KVBoostLLM` but answering."""

    model: str = Field(default="smollm2", description="Hub id, local folder, .gguf file, or smollm2.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy.")
    max_tokens: int = Field(default=256, gt=0, description="Most new tokens per answer.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, description="0 is off.")
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    context_window: int | None = Field(
        default=None, gt=0, description="Smaller than the model's own, to limit prompts."
    )
    reuse: str = Field(default="chunks", description="chunks, prefix (exact only) or off.")
    repair: str | Repair = Field(default="balanced", description="fast, balanced, faithful, or a Repair value.")
    store: str | None = Field(default="~/.cache/kvboost-rag", description="Folder, memory, or None (off).")
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further chat template variables.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Further options of kvboost_rag.KVBoost.")
    is_function_calling_model: bool = True
    watch: bool = Field(default=True, description="Learn the texts of nodes as retrievers return them.")

    _shared: SharedEngine = PrivateAttr()
    _retrieved: RetrievedTexts = PrivateAttr(default_factory=RetrievedTexts)

    def __init__(self, *, engine: KVBoost | None = None, **fields: Any) -> None:
        if engine is not None:
            fields.setdefault("model", engine.adapter.name)
        super().__init__(**fields)
        self._shared = SharedEngine.of(engine) if engine is not None else self._reference()
        if self.watch:
            watch_retrievals(self._retrieved)
        self._prepare(self._shared.get())

    def _reference(self) -> SharedEngine:
        return SharedEngine(
            self.model,
            store=self.store,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            **self.engine_options,
        )

    def _prepare(self, engine: KVBoost) -> None:
        """Refuse now what every call would refuse."""
        engine.render("any", **build_options(self._defaults(), {}))
        if self.reuse != "off":
            engine.adapter.require_reuse()

    # -- state -------------------------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled objects load their model at first use."""
        super(BaseComponent, self).__setstate__(state)
        if not isinstance(self.__dict__.get("callback_manager"), CallbackManager):
            self.__dict__["callback_manager"] = CallbackManager([])
        if self.watch:
            watch_retrievals(self._retrieved)

    @field_serializer("store")
    def _store_without_password(self, store: str | None) -> str | None:
        return safe_store(store)

    @field_serializer("engine_options")
    def _options_without_salt(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != "salt"}

    @property
    def engine(self) -> KVBoost:
        """The engine; shared by all LLM objects of this process that ask for the same."""
        return self._shared.get()

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self.engine.adapter.tokenizer

    def set_global_tokenizer(self) -> None:
        """Let LlamaIndex count this model's tokens when it splits documents, packs contexts and trims memories."""
        tokenizer = self.tokenizer
        set_global_tokenizer(lambda text: list(tokenizer.encode(text, add_special_tokens=False)))

    def count_tokens(self, prompt: str | Sequence[ChatMessage]) -> int:
        """Tokens of a text, or of messages rendered through the chat template."""
        if isinstance(prompt, str):
            return len(self.tokenizer.encode(prompt, add_special_tokens=False))
        messages, _ = fit_messages(self.tokenizer, to_dicts(prompt))
        return self.engine.count_tokens(messages, template_kwargs=self.template_kwargs)

    def register_retrieved(self, texts: Sequence[str]) -> None:
        """Texts that the next prompts may hold; those that stand there are stored after the answer."""
        self._retrieved.add(texts)

    @property
    def is_chat_model(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def metadata(self) -> LLMMetadata:
        """The true window and abilities of the loaded model."""
        window = min(self.context_window or self.engine.adapter.max_tokens, self.engine.adapter.max_tokens)
        return LLMMetadata(
            context_window=window,
            num_output=min(self.max_tokens, max(1, window // 4)),  # more would leave no room for a prompt
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model and self.is_chat_model,
            model_name=self.model,
            system_role=MessageRole.SYSTEM,  # templates without one get it inside the first user message
        )

    def to_payload(self) -> dict[str, Any]:
        """What events carry: name, metadata and settings, no paths and no secrets."""
        shown = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        repair = self.repair.label if isinstance(self.repair, Repair) else self.repair
        return {**super().to_payload(), **shown, "reuse": self.reuse, "repair": repair}

    def _defaults(self) -> dict[str, Any]:
        names = ("temperature", "max_tokens", "top_p", "top_k", "repetition_penalty", "seed", "stop")
        return {name: getattr(self, name) for name in (*names, "reuse", "repair", "template_kwargs")}
