from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kvboost_rag.cli import jobs
from kvboost_rag.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from tests.cli.conftest import FakeEngine, run
from tests.warmup.fakes import text_of

NUMBERS = ("chunks", "stored", "skipped", "failed")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    lines = [json.dumps({"text": text_of(i)}) for i in range(20)]
    (folder / "ready.jsonl").write_text("\n".join(lines))
    (folder / "prose.txt").write_text("Some prose.")
    return folder


def test_all_fine_is_status_0_with_a_summary_on_stdout(corpus: Path, engine: FakeEngine) -> None:
    result = run("warmup", corpus, "--store", corpus.parent / "kv")
    assert result.exit_code == 0
    assert "21 chunks: 21 stored, 0 there before, 0 failed" in result.stdout
    assert result.stderr == ""
    assert engine.closed


def test_options_reach_the_engine(corpus: Path, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "filler.txt").write_text("Neutral prose.")
    (tmp_path / "head.txt").write_text("You are helpful.")
    words = "--model m --store kv --store-limit 2GiB --dtype float32 --device cpu --revision r --keep-text".split()
    files = ["--filler", tmp_path / "filler.txt", "--head", f"@{tmp_path / 'head.txt'}"]
    assert run("warmup", corpus, *words, *files).exit_code == 0
    assert engine.options
    assert engine.options.model == "m"
    assert engine.options.kwargs() == {
        "store": "kv",
        "dtype": "float32",
        "device": "cpu",
        "revision": "r",
        "filler": "Neutral prose.",
        "disk_bytes": 2 << 30,
        "keep_text": True,
    }
    assert engine.heads == ["You are helpful."]


def test_bad_inputs_are_status_1_and_listed_on_stderr(corpus: Path, engine: FakeEngine) -> None:
    (corpus / "bad.jsonl").write_text('{"text": "good"}\n{"text": 1}')
    (corpus / "logo.png").write_bytes(b"x")
    result = run("warmup", corpus, corpus / "absent")
    assert result.exit_code == 1
    assert "22 stored" in result.stdout
    assert f"{corpus / 'bad.jsonl'}:2: 'text' is not a string" in result.stderr
    assert f"{corpus / 'absent'}: no such file or folder" in result.stderr
    assert "logo.png" in result.stderr


def test_skip_unknown_is_status_0_and_counts(corpus: Path, engine: FakeEngine) -> None:
    (corpus / "logo.png").write_bytes(b"x")
    result = run("warmup", corpus, "--skip-unknown")
    assert result.exit_code == 0
    assert "ignored: 1 × .png" in result.stderr


def test_json_is_one_object_on_stdout(corpus: Path, engine: FakeEngine) -> None:
    (corpus / "bad.txt").write_bytes(b"\0")
    result = run("warmup", corpus, "--json")
    found = json.loads(result.stdout)
    assert [found[name] for name in NUMBERS] == [21, 21, 0, 0]
    assert found["problems"] == [
        {"source": str(corpus / "bad.txt"), "line": None, "reason": "binary data in a text file"}
    ]


def test_a_rerun_skips(corpus: Path, engine: FakeEngine) -> None:
    run("warmup", corpus)
    found = json.loads(run("warmup", corpus, "--json").stdout)
    assert [found[name] for name in NUMBERS] == [21, 0, 21, 0]


def test_ctrl_c_is_status_130_and_a_rerun_continues(corpus: Path, engine: FakeEngine) -> None:
    engine.encoder_.interrupt_at = 1
    first = run("warmup", corpus, "--batch-tokens", 50, "--json")
    assert first.exit_code == 130
    assert "run the same command again" in first.stderr
    done = json.loads(first.stdout)["stored"]
    assert done > 0
    engine.encoder_.interrupt_at = None
    again = json.loads(run("warmup", corpus, "--json").stdout)
    assert (again["stored"], again["skipped"]) == (21 - done, done)


def test_ctrl_c_while_the_model_loads_is_status_130(corpus: Path, engine: FakeEngine) -> None:
    engine.error = KeyboardInterrupt()  # type: ignore[assignment]
    assert run("warmup", corpus).exit_code == 130


def test_sigterm_is_like_ctrl_c(corpus: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = engine.encoder_.encode

    def killed(*args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), 15)
        return encode(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.encoder_, "encode", killed)
    assert run("warmup", corpus).exit_code == 130


def test_stdin(engine: FakeEngine, tmp_path: Path) -> None:
    result = run("warmup", "-", "--json", stdin='{"text": "a"}\n{"text": "b"}\n')
    assert json.loads(result.stdout)["stored"] == 2


def test_chunk_sizes_reach_the_splitter(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six seven eight")
    found = json.loads(run("warmup", tmp_path, "--json", "--chunk-size", 10, "--chunk-overlap", 0).stdout)
    assert found["stored"] == 5


def test_dry_run_stores_nothing(corpus: Path, engine: FakeEngine) -> None:
    result = run("warmup", corpus, "--dry-run")
    assert result.exit_code == 0
    assert "21 chunks, 0 stored already, 21 to compute" in result.stdout
    assert "102 tokens" in result.stdout
    assert list(engine.encoder_.store.keys()) == []
    found = json.loads(run("warmup", corpus, "--dry-run", "--json").stdout)
    assert (found["new_chunks"], found["tokens"], found["bytes"]) == (21, 102, 816)


def test_shards_share_the_corpus(corpus: Path, engine: FakeEngine) -> None:
    found = [json.loads(run("warmup", corpus, "--json", "--shard", f"{i}/3").stdout) for i in (1, 2, 3)]
    assert sum(part["stored"] for part in found) == 21
    assert all(part["skipped"] == 0 for part in found)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x", "--shard", "3/2"],
        ["x", "--shard", "1"],
        ["x", "--chunk-size", "5", "--chunk-overlap", "5"],
        ["x", "--store", "memory"],
        ["x", "--store", "none"],
        ["x", "--jobs", "2", "--shard", "1/2"],
        ["-", "--jobs", "2"],
        ["-", "-"],
        ["x", "--head", "@/no/such/file"],
        ["x", "--no-such-option"],
    ],
)
def test_a_wrong_call_is_status_2(words: list[str], engine: FakeEngine) -> None:
    result = run("warmup", *words)
    assert result.exit_code == 2
    assert engine.options is None
    assert "rror: " in result.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFoundError("no model 'x'", hint="try smollm2"), 1),
        (UnsupportedModelError("no", hint="try smollm2"), 1),
        (UsageError("bad dtype", hint="try smollm2"), 2),
    ],
)
def test_our_errors_are_one_line(corpus: Path, engine: FakeEngine, error: Exception, status: int) -> None:
    engine.error = error
    result = run("warmup", corpus)
    assert result.exit_code == status
    assert result.stderr == f"error: {error}\n"
    assert "(try smollm2)" in result.stderr


def test_debug_brings_the_traceback_back(corpus: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_DEBUG", "1")
    engine.error = UsageError("bad dtype")
    assert run("warmup", corpus).exception is engine.error


def test_a_missing_library_shows_before_the_model_is_loaded(
    corpus: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langchain_text_splitters", None)
    result = run("warmup", corpus)
    assert result.exit_code == 1
    assert "pip install 'kvboost-rag[ingest]'" in result.stderr
    assert engine.options is None


CHILD = """
import json, os, signal, sys
words = sys.argv[1:]
shard = words[words.index("--shard") + 1]
report = dict(stored=2, skipped=1, failed=0, tokens=10, bytes=80, seconds=1.0, interrupted=False, ignored={".png": 1},
              problems=[dict(source="a.pdf", line=None, reason="unreadable")])
mode = os.environ.get("MODE")
signal.signal(signal.SIGTERM, signal.default_int_handler)
if mode == "crash" and shard == "2/2":
    sys.exit("Segmentation fault")
if mode == "interrupt":
    try:
        if shard == "2/2":
            os.kill(int(os.environ["KVBOOST_RAG_JOB_OF"]), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        report.update(interrupted=True, stored=1)
print("talk", file=sys.stderr)
report["words"] = words
if mode == "words":
    report["problems"] = [dict(source=json.dumps(words), line=None, reason="")]
print(json.dumps(report))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(jobs, "CHILD_COMMAND", (sys.executable, str(script)))
    return script


def test_jobs_add_up_to_one_report(engine: FakeEngine, child: Path) -> None:
    result = run("warmup", "docs", "--jobs", 2, "--json")
    found = json.loads(result.stdout)
    assert [found[name] for name in NUMBERS] == [6, 4, 2, 0]
    assert len(found["problems"]) == 1
    assert found["ignored"] == {".png": 1}
    assert result.exit_code == 1
    assert "[1/2] talk" in result.stderr
    assert engine.options is None  # the model is loaded in the jobs only


def test_jobs_get_the_same_options(engine: FakeEngine, child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "words")
    options = "--model m --tag x --tag y --chunk-size 500 --head @x --keep-text --no-progress --skip-unknown".split()
    (child.parent / "x").write_text("head")
    monkeypatch.chdir(child.parent)
    result = run("warmup", *options, "--jobs", 2, "--json", "--", "-odd", "docs")
    words = json.loads(json.loads(result.stdout)["problems"][0]["source"])
    assert words[:4] == ["warmup", "--shard", "1/2", "--json"]
    assert words[-3:] == ["--", "-odd", "docs"]
    text = " ".join(words)
    for option in (
        "--model m",
        "--tag x --tag y",
        "--chunk-size 500",
        "--head @x",
        "--keep-text",
        "--no-progress",
        "--skip-unknown",
    ):
        assert option in text
    assert "--jobs" not in words
    assert "--dry-run" not in words


def test_a_job_that_dies_is_told(engine: FakeEngine, child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "crash")
    result = run("warmup", "docs", "--jobs", 2, "--json")
    assert result.exit_code == 1
    assert "job 2/2: ended with status 1" in result.stderr
    assert "[2/2] Segmentation fault" in result.stderr


def test_ctrl_c_is_handed_on_and_the_jobs_reports_are_awaited(
    engine: FakeEngine, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "interrupt")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        result = run("warmup", "docs", "--jobs", 2, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert found["interrupted"] is True
    assert found["stored"] >= 1  # the second job was certainly ready to report


def test_a_job_without_its_starter_stops(corpus: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_RAG_JOB_OF", "1" if os.getppid() != 1 else "2")
    assert run("warmup", corpus).exit_code == 130
    monkeypatch.setenv("KVBOOST_RAG_JOB_OF", str(os.getppid()))
    assert run("warmup", corpus).exit_code == 0
