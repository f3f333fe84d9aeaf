"""A tiny engine behind the LLM class, and LlamaIndex' process-wide state put back after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed (make setup)")

import llama_index.core
from llama_index.core import Settings
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.embeddings import MockEmbedding

if TYPE_CHECKING:
    from llama_index.llms.kvboost_rag import KVBoostLLM

    from kvboost_rag import KVBoost
    from kvboost_rag.model.load import LoadedModel


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Defaults of LlamaIndex are global, and would otherwise ask OpenAI."""
    before = llama_index.core.global_tokenizer
    Settings.embed_model = MockEmbedding(8)
    yield
    llama_index.core.global_tokenizer = before
    for name in ("_llm", "_embed_model", "_callback_manager", "_prompt_helper", "_chat_prompt_helper", "_node_parser"):
        setattr(Settings, name, None)


@pytest.fixture
def make_engine(tiny: Any, tokenizer: Any) -> Iterator[Callable[..., KVBoost]]:
    """Engines over the tiny model, each with an empty store of its own."""
    from kvboost_rag import KVBoost

    made: list[KVBoost] = []

    def make(**options: Any) -> KVBoost:
        given = {"model": tiny, "tokenizer": tokenizer, "store": "memory", "filler_tokens": 32, **options}
        made.append(KVBoost(given.pop("model"), given.pop("tokenizer"), **given))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_llm(make_engine: Callable[..., KVBoost]) -> Callable[..., KVBoostLLM]:
    """LLMs over an engine of their own; ``engine_options`` reach the engine."""
    from llama_index.llms.kvboost_rag import KVBoostLLM

    def make(engine_options: dict[str, Any] | None = None, **fields: Any) -> KVBoostLLM:
        return KVBoostLLM(**{"engine": make_engine(**(engine_options or {})), "max_tokens": 6, **fields})

    return make


@pytest.fixture
def counter() -> TokenCountingHandler:
    """Counts the tokens that LLM events carry."""
    return TokenCountingHandler(tokenizer=lambda text: list(text))


@pytest.fixture
def llm(make_llm: Callable[..., KVBoostLLM], counter: TokenCountingHandler) -> KVBoostLLM:
    """The LLM as the default of LlamaIndex, tokens counted."""
    Settings.callback_manager = CallbackManager([counter])
    made = make_llm()
    made.set_global_tokenizer()
    Settings.llm = made
    return made


@pytest.fixture(scope="session")
def real_engine(smollm2: LoadedModel) -> Iterator[KVBoost]:
    """SmolLM2 over a store in memory; its blocks are shared by the tests of a session."""
    from kvboost_rag import KVBoost

    engine = KVBoost(smollm2.model, smollm2.tokenizer, name="smollm2", store="memory")
    yield engine
    engine.close()


@pytest.fixture
def smol_llm(smollm2: LoadedModel, counter: TokenCountingHandler) -> Iterator[KVBoostLLM]:
    """Like ``llm``, over SmolLM2 with an empty store. A short filler: for tests about hits, not about fidelity."""
    from llama_index.llms.kvboost_rag import KVBoostLLM

    from kvboost_rag import KVBoost

    Settings.callback_manager = CallbackManager([counter])
    engine = KVBoost(smollm2.model, smollm2.tokenizer, name="smollm2", store="memory", filler_tokens=48)
    Settings.llm = made = KVBoostLLM(engine=engine, max_tokens=4)
    made.set_global_tokenizer()
    yield made
    engine.close()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine's report of every request, counted where the engine answers."""
    from kvboost_rag.engine.engine import Engine

    seen: list[Any] = []
    run = Engine.run

    def spy(self: Engine, request: Any) -> Iterator[Any]:
        for piece in run(self, request):
            if piece.result is not None:
                seen.append(piece.result.report)
            yield piece

    monkeypatch.setattr(Engine, "run", spy)
    return seen
