"""A command line whose engine is a fake one: real ingest, real job, real store, no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvboost_rag.cli import common, main
from kvboost_rag.cli.common import EngineOptions
from tests.warmup.fakes import FakeEncoder


class FakeReport:
    def as_dict(self) -> dict[str, object]:
        return {"prompt_tokens": 100, "reused_tokens": 80}

    def table(self) -> str:
        return "prompt 100  reused 80"


@dataclass
class FakeEngine:
    """Answers with the messages it was given; remembers the options and the settings."""

    encoder_: FakeEncoder = field(default_factory=FakeEncoder)
    options: EngineOptions | None = None
    heads: list[str | None] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    closed: bool = False

    def encoder(self, head: str | None = None) -> FakeEncoder:
        self.heads.append(head)
        return self.encoder_

    def generate(self, messages: list[dict[str, str]], **settings: Any) -> Any:
        self.messages, self.settings = messages, settings
        return SimpleNamespace(text="Forty-two.", finish_reason="stop", report=FakeReport())

    def stream(self, messages: list[dict[str, str]], **settings: Any) -> Iterator[Any]:
        result = self.generate(messages, **settings)
        yield SimpleNamespace(text="Forty-", result=None)
        yield SimpleNamespace(text="two.", result=result)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def make(options: EngineOptions) -> FakeEngine:
        fake.options = options
        if fake.error:
            raise fake.error
        return fake

    monkeypatch.setattr(common, "make_engine", make)
    for name in ("KVBOOST_DEBUG", "KVBOOST_STORE", "KVBOOST_MODEL", "KVBOOST_SALT", "KVBOOST_RAG_JOB_OF"):
        monkeypatch.delenv(name, raising=False)
    return fake


def run(*words: object, stdin: str | bytes | None = None) -> Result:
    """Invoke ``kvboost-rag`` with these words."""
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin)
