"""``warmup --ray`` on a real Ray of one machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.cli import ray_jobs
from kvboost_rag.cli.ray_jobs import Share, share_of
from kvboost_rag.store import open_store
from tests.cli.conftest import FakeEngine, run
from tests.tiny import save_tiny
from tests.warmup.fakes import text_of

NUMBERS = ("chunks", "stored", "skipped", "failed")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="ray is not installed (pip install 'kvboost-rag[ray]')")
    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield module
    module.shutdown()


CHILD = """
import json, os, signal, sys
words = sys.argv[1:]
shard, mode, folder = (words[words.index(name) + 1] for name in ("--shard", "--model", "--store"))
report = dict(stored=2, skipped=1, failed=0, tokens=10, bytes=80, seconds=1.0, interrupted=False, ignored={},
              problems=[dict(source="a.pdf", line=None, reason="unreadable")])
signal.signal(signal.SIGTERM, signal.default_int_handler)
if mode == "crash" and shard == "2/2":
    sys.exit(3)
if mode == "lose" and not os.path.exists(folder + "/lost"):
    open(folder + "/lost", "w").close()
    os.kill(os.getppid(), signal.SIGKILL)  # the worker, as if its node were gone
if mode == "interrupt":
    try:
        if shard == "2/2":
            os.kill(int(open(folder + "/driver").read()), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        report.update(interrupted=True, stored=1)
if mode == "words":
    report["problems"] = [dict(source=json.dumps([os.getcwd(), *words]), line=None, reason="")]
print(json.dumps(report))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "driver").write_text(str(os.getpid()))
    monkeypatch.setattr(ray_jobs, "CHILD_COMMAND", (sys.executable, str(tmp_path / "child.py")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def warmup(folder: Path, mode: str, *words: object) -> tuple[int, dict[str, Any]]:
    result = run("warmup", "docs", "--model", mode, "--store", folder, "--ray", "--json", *words)
    return result.exit_code, json.loads(result.stdout)


def test_shards_add_up_to_one_report(ray: Any, engine: FakeEngine, child: Path) -> None:
    status, found = warmup(child, "fine", "--jobs", 2)
    assert [found[name] for name in NUMBERS] == [6, 4, 2, 0]
    assert (status, len(found["problems"])) == (1, 1)
    assert engine.options is None  # the model is loaded in the tasks only


def test_tasks_run_the_same_command_in_the_same_folder(ray: Any, engine: FakeEngine, child: Path) -> None:
    words = json.loads(warmup(child, "words", "--jobs", 1, "--chunk-size", 500)[1]["problems"][0]["source"])
    assert words[:5] == [str(child), "warmup", "--shard", "1/1", "--json"]
    assert "--chunk-size 500" in " ".join(words)
    assert not {"--ray", "--jobs"} & set(words)


def test_a_shard_that_dies_is_told(ray: Any, engine: FakeEngine, child: Path) -> None:
    status, found = warmup(child, "crash", "--jobs", 2)
    assert (status, found["stored"]) == (1, 2)
    assert {"source": "job 2/2", "line": None, "reason": "ended with status 3"} in found["problems"]


def test_a_shard_whose_worker_is_lost_is_run_again(ray: Any, engine: FakeEngine, child: Path) -> None:
    found = warmup(child, "lose", "--jobs", 2)[1]
    assert (child / "lost").exists()
    assert [found[name] for name in NUMBERS] == [6, 4, 2, 0]


def test_ctrl_c_is_handed_on(ray: Any, engine: FakeEngine, child: Path) -> None:
    status, found = warmup(child, "interrupt", "--jobs", 2)
    assert (status, found["interrupted"]) == (130, True)


def test_nodes_that_share_no_folder(ray: Any, engine: FakeEngine, child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}] * 2)
    result = run("warmup", "docs", "--store", child, "--ray")
    assert result.exit_code == 2
    assert "2 nodes" in result.stderr
    assert "redis://" in result.stderr


@pytest.mark.slow
def test_a_corpus_lands_in_one_store(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model")
    lines = [json.dumps({"text": text_of(i)}) for i in range(12)]
    (tmp_path / "chunks.jsonl").write_text("\n".join(lines))
    words = ["warmup", tmp_path / "chunks.jsonl", "--model", tmp_path / "model", "--store", tmp_path / "kv", "--json"]
    result = run(*words, "--ray", "--jobs", 2)
    found = json.loads(result.stdout)
    assert (result.exit_code, [found[name] for name in NUMBERS]) == (0, [12, 12, 0, 0]), result.stderr
    with open_store(tmp_path / "kv") as store:
        assert store.stats().blocks == 12
        assert store.check() == []
    again = json.loads(run(*words, "--ray").stdout)
    assert [again[name] for name in NUMBERS] == [12, 0, 12, 0]


# -- without Ray -------------------------------------------------------------------------------------------------------

CPU4, CPU8, GPU2 = {"CPU": 4.0}, {"CPU": 8.0, "memory": 1e9}, {"CPU": 16.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "count", "share"),
    [
        ([CPU4], None, Share(1, 4, 0)),
        ([CPU4, CPU8], None, Share(2, 4, 0)),
        ([CPU4, CPU8], 8, Share(8, 1, 0)),
        ([CPU4], 100, Share(100, 1, 0)),
        ([CPU4, GPU2, GPU2], None, Share(4, 1, 1)),
        ([GPU2], 3, Share(3, 1, 1)),
        ([{"memory": 1.0}, CPU4], None, Share(1, 4, 0)),
        ([{}], None, Share(1, 1, 0)),
    ],
)
def test_every_task_fits_a_node(nodes: list[dict[str, float]], count: int | None, share: Share) -> None:
    assert share_of(nodes, count) == share


@pytest.mark.parametrize("words", [["--shard", "1/2"], ["-"]])
def test_what_cannot_be_shared_is_status_2(words: list[str], engine: FakeEngine) -> None:
    result = run("warmup", "docs" if words != ["-"] else "-", *[w for w in words if w != "-"], "--ray")
    assert result.exit_code == 2


def test_without_ray_the_error_names_the_command(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("warmup", "docs", "--ray")
    assert result.exit_code == 1
    assert "pip install 'kvboost-rag[ray]'" in result.stderr
