from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvboost_rag.cli import store as store_commands
from kvboost_rag.store.base import Problem
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.warmup import warm
from tests.cli.conftest import run
from tests.store.blocks import make_block
from tests.warmup.fakes import FakeEncoder, text_of


class PrunableStore(MemoryStore):
    """A store with findings, and with the optional ``prune``."""

    findings: list[Problem] = []
    pruned: dict[str, float] = {}

    def check(self, fix: bool = False) -> list[Problem]:
        return [Problem(p.kind, p.where, p.detail, fix) for p in self.findings]

    def prune(self, **limits: float) -> int:
        self.pruned = limits
        return sum(self.delete(key) for key in list(self.keys())[:2])


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> PrunableStore:
    opened = PrunableStore()
    warm(FakeEncoder(opened), [text_of(i) for i in range(5)])
    monkeypatch.setattr(store_commands, "open_existing", lambda spec: opened)
    return opened


def test_stats(kv: PrunableStore) -> None:
    result = run("store", "stats")
    assert result.exit_code == 0
    assert "5 blocks" in result.stdout
    assert json.loads(run("store", "stats", "--json").stdout)["blocks"] == 5


def test_check_of_a_healthy_store_is_status_0(kv: PrunableStore) -> None:
    result = run("store", "check")
    assert (result.exit_code, result.stdout) == (0, "healthy\n")
    assert json.loads(run("store", "check", "--json").stdout) == {"healthy": True, "problems": []}


@pytest.mark.parametrize("fix", [False, True])
def test_check_that_finds_damage_is_status_1(kv: PrunableStore, fix: bool) -> None:
    kv.findings = [Problem("damaged", "kv1:ab", "checksum")]
    words = ["--fix"] if fix else []
    result = run("store", "check", *words)
    assert result.exit_code == 1
    assert "damaged: kv1:ab: checksum" in result.stdout
    assert ("(fixed)" in result.stdout) is fix
    assert json.loads(run("store", "check", "--json", *words).stdout)["problems"][0]["fixed"] is fix


def test_prune_hands_its_limits_on(kv: PrunableStore) -> None:
    result = run("store", "prune", "--max-bytes", "1.5KiB", "--older-than", "2d", "--json")
    assert result.exit_code == 0
    assert kv.pruned == {"max_bytes": 1536, "older_than_s": 172800.0}
    assert json.loads(result.stdout)["dropped"] == 2
    assert json.loads(result.stdout)["blocks"] == 3


def test_prune_of_a_store_that_cannot_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commands, "open_existing", lambda spec: MemoryStore())
    assert run("store", "prune", "--max-bytes", "1").exit_code == 2


@pytest.mark.parametrize("words", [[], ["--max-bytes", "many"], ["--older-than", "-1d"]])
def test_prune_without_a_good_limit_is_status_2(kv: PrunableStore, words: list[str]) -> None:
    assert run("store", "prune", *words).exit_code == 2
    assert kv.stats().blocks == 5


def test_clear_asks_first(kv: PrunableStore) -> None:
    assert run("store", "clear", stdin="n\n").exit_code == 1
    assert run("store", "clear", stdin="").exit_code == 1
    assert kv.stats().blocks == 5
    result = run("store", "clear", stdin="y\n")
    assert (result.exit_code, result.stdout) == (0, "5 blocks dropped\n")
    assert kv.stats().blocks == 0


def test_clear_with_yes_does_not_ask(kv: PrunableStore) -> None:
    result = run("store", "clear", "--yes", "--json")
    assert json.loads(result.stdout) == {"dropped": 5}


@pytest.mark.parametrize("name", ["stats", "check", "clear"])
def test_a_folder_that_is_not_there_is_not_made(name: str, tmp_path: object) -> None:
    pytest.importorskip("kvboost_rag.store.open")
    result = run("store", name, "--store", f"{tmp_path}/absent")
    assert result.exit_code == 2
    assert "no store at" in result.stderr


def test_a_real_folder_is_shown_checked_and_emptied(tmp_path: object) -> None:
    folder = f"{tmp_path}/kv"
    with DiskStore(folder, min_free_bytes=0) as disk:
        warm(FakeEncoder(disk), [text_of(i) for i in range(5)])  # type: ignore[arg-type]
    assert json.loads(run("store", "stats", "--store", folder, "--json").stdout)["blocks"] == 5
    assert run("store", "check", "--store", folder).exit_code == 0
    damaged = next(path for path in Path(folder).rglob("*") if path.is_file() and "blocks" in path.parts)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run("store", "check", "--store", folder, "--fix").exit_code == 1
    assert run("store", "check", "--store", folder).exit_code == 0
    assert json.loads(run("store", "clear", "--store", folder, "--yes", "--json").stdout) == {"dropped": 4}


def test_delete_by_tag_and_prune_on_a_real_folder(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for i in range(4):
            store.put(make_block(i, tags=("doc",) if i < 2 else ()))
    at = ["--store", str(tmp_path), "--json"]
    assert json.loads(run("store", "delete", "--tag", "doc", *at).stdout) == {"dropped": 2}
    assert json.loads(run("store", "prune", "--max-bytes", "0", *at).stdout)["dropped"] == 2
    assert json.loads(run("store", "stats", *at).stdout)["policy"] == "lru"
    assert run("store", "delete", "--store", str(tmp_path)).exit_code == 2


@pytest.mark.parametrize("words", [["stats"], ["check", "--fix"], ["set", "--limit", "1GiB"], ["clear", "--yes"]])
def test_a_folder_that_is_no_store_stays_as_it_is(words: list[str], tmp_path: Path) -> None:
    for name in ("papers", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "papers" / "a.txt").write_text("mine")
    for name, held in (("papers", ["a.txt"]), ("empty", [])):
        result = run("store", *words, "--store", tmp_path / name)
        assert result.exit_code == 2
        assert "no store at" in result.stderr
        assert os.listdir(tmp_path / name) == held
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755
