from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvboost_rag.cli.retrieve import best_chunks
from kvboost_rag.warmup import SourceChunk
from tests.cli.conftest import FakeEngine, run

PASSAGES = [
    "The lighthouse of Kiel was built in 1967.",
    "Bread is baked from flour, water and salt.",
    "  The harbour of Kiel freezes in hard winters.\n",
    "Blocks are stored under the hash of their text.",
]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "id": f"p{i}"}) for i, text in enumerate(PASSAGES)))
    return path


def test_the_answer_is_on_stdout_and_the_report_on_stderr(docs: Path, engine: FakeEngine) -> None:
    result = run("ask", "When was the lighthouse built?", docs)
    assert result.exit_code == 0
    assert result.stdout == "Forty-two.\n"
    assert "prompt 100  reused 80" in result.stderr
    assert f"chunk 0: {docs}:1" in result.stderr


def test_the_prompt_holds_the_best_chunks_exactly(docs: Path, engine: FakeEngine) -> None:
    run("ask", "harbour of Kiel", docs, "--k", 2)
    system, user = engine.messages
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"] == f"{PASSAGES[2]}\n\n{PASSAGES[0]}\n\nQuestion: harbour of Kiel"
    assert engine.settings["chunks"] == [PASSAGES[2], PASSAGES[0]]


def test_options_reach_the_engine(docs: Path, engine: FakeEngine) -> None:
    words = "--reuse prefix --repair fast --max-tokens 9 --temperature 0.5 --seed 3 --model m --store none".split()
    assert run("ask", "Kiel", docs, *words).exit_code == 0
    expected = {"reuse": "prefix", "repair": "fast", "max_new_tokens": 9, "temperature": 0.5, "seed": 3}
    assert {name: engine.settings[name] for name in expected} == expected
    assert engine.options
    assert (engine.options.model, engine.options.store) == ("m", None)


def test_json_is_one_object(docs: Path, engine: FakeEngine) -> None:
    result = run("ask", "harbour of Kiel", docs, "--json", "--k", 1)
    found = json.loads(result.stdout)
    assert found["answer"] == "Forty-two."
    assert found["report"]["reused_tokens"] == 80
    assert found["sources"] == [{"source": str(docs), "line": 3, "id": "p2"}]


def test_streaming_prints_the_same_text(docs: Path, engine: FakeEngine) -> None:
    result = run("ask", "Kiel", docs, "--stream")
    assert result.stdout == "Forty-two.\n"
    assert "reused 80" in result.stderr


def test_bad_inputs_are_told_and_the_answer_still_given(docs: Path, engine: FakeEngine) -> None:
    (docs.parent / "bad.txt").write_bytes(b"\0")
    result = run("ask", "Kiel", docs.parent)
    assert result.exit_code == 0
    assert "bad.txt: binary data" in result.stderr


@pytest.mark.parametrize(
    "words", [["Kiel", "/no/such"], ["Kiel"], ["Kiel", "x", "--json", "--stream"], ["K", "x", "--reuse", "all"]]
)
def test_a_wrong_call_is_status_2(words: list[str], engine: FakeEngine) -> None:
    assert run("ask", *words).exit_code == 2
    assert engine.options is None


def test_bm25_finds_the_passage_with_the_rare_word() -> None:
    chunks = [SourceChunk(text) for text in PASSAGES]
    assert best_chunks("the hash of the blocks", chunks, 1)[0].text == PASSAGES[3]


@pytest.mark.parametrize("texts", [["Kiel"], ["Kiel", "Kiel harbour"], ["!!", "Kiel"], ["!!"], []])
def test_bm25_bears_tiny_and_odd_corpora(texts: list[str]) -> None:
    found = best_chunks("Kiel", [SourceChunk(text) for text in texts], 5)
    assert sorted(chunk.text for chunk in found) == sorted(texts)
    if "Kiel" in texts:
        assert found[0].text == "Kiel"


def test_a_missing_retriever_names_the_extra(docs: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rank_bm25", None)
    result = run("ask", "Kiel", docs)
    assert result.exit_code == 1
    assert "kvboost-rag[ingest]" in result.stderr
