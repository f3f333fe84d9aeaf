"""Fixtures: the real small model behind a fresh engine, and the corpus."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document

from kvboost_rag import KVBoost
from tests.integrations.langchain import corpus


@pytest.fixture
def smol(smollm2: Any) -> KVBoost:
    """SmolLM2 with an empty store. A short filler: these tests are about hits, not about fidelity."""
    return KVBoost(smollm2.model, smollm2.tokenizer, store="memory", filler_tokens=48, name="smollm2")


@pytest.fixture
def guide() -> list[Document]:
    return corpus.documents()
