"""The index can lie, be damaged, locked or gone: blocks are served all the same, and nothing is ever unpickled."""

from __future__ import annotations

import os
import pickle
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import DiskStore
from kvboost_rag.store.disk_index import BlockIndex
from kvboost_rag.store.disk_rows import BlockDisk, RefusedRow
from tests.store.blocks import make_block, same

BLOCKS = [make_block(i, tags=(f"doc-{i}",)) for i in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DiskStore(tmp_path) as store:
        for block in BLOCKS:
            store.put(block)
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    with DiskStore(folder, lock_timeout_s=0.01) as store:
        yield store


def database(folder: Path) -> Path:
    return folder / "index" / "cache.db"


def is_whole(store: DiskStore) -> bool:
    return (
        all(same(found, block) for found, block in zip(store.get_many([b.key for b in BLOCKS]), BLOCKS, strict=True))
        and sorted(store.keys()) == sorted(block.key for block in BLOCKS)
        and store.check() == []
    )


def sql(folder: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database(folder))) as connection:
        rows = connection.execute(statement, values).fetchall()
        connection.commit()
    return rows


DAMAGE = {
    "garbage": lambda path: path.write_bytes(b"garbage " * 4096),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "pages": lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(path.stat().st_size - 4096)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_built_again_on_opening(folder: Path, damage: str) -> None:
    DAMAGE[damage](database(folder))
    with DiskStore(folder) as store:
        if damage == "pages":  # inside of a database that opens: found by looking
            store.check(fix=True)
        assert is_whole(store)
        assert store.put(make_block(9))


@pytest.mark.parametrize("damage", ["garbage", "half", "gone"])
def test_an_index_damaged_under_an_open_store(store: DiskStore, folder: Path, damage: str) -> None:
    for path in (folder / "index").glob("cache.db-*"):
        path.unlink()
    DAMAGE[damage](database(folder))
    assert store.put(make_block(9))
    assert same(store.get(make_block(9).key), make_block(9))
    store.delete(make_block(9).key)
    assert is_whole(store)


def test_a_rebuilt_index_keeps_tags_and_order(folder: Path) -> None:
    before = sql(folder, "SELECT key, tag, size FROM Cache ORDER BY access_time")
    database(folder).unlink()
    DiskStore(folder).close()
    assert sql(folder, "SELECT key, tag, size FROM Cache ORDER BY access_time") == before


def test_an_index_rebuilt_by_another_process_is_noticed(store: DiskStore, folder: Path) -> None:
    with DiskStore(folder) as other:
        other.index.rebuild("test")
        other.put(make_block(7))
    assert make_block(7).key in set(store.keys())
    store.put(make_block(8))
    assert sql(folder, "SELECT COUNT(*) FROM Cache") == [(7,)]


def test_a_locked_index_loses_nothing(store: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = [make_block(8), make_block(9)]
    with closing(sqlite3.connect(database(folder), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert all(store.put(block) for block in new)
        assert all(same(store.get(block.key), block) for block in [*new, *BLOCKS])
        store.stats()
        assert store.delete(new[0].key)
        other.execute("ROLLBACK")
    assert sorted(store.keys()) == sorted(block.key for block in [new[1], *BLOCKS])
    assert store.check() == []
    assert len([r for r in caplog.records if "does not answer" in r.message]) == 1


def test_an_index_locked_for_good_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, failures = BlockIndex._connect, [sqlite3.OperationalError("database is locked")]

    def locked_once(self: BlockIndex) -> object:
        if failures:
            raise failures.pop()
        return connect(self)

    monkeypatch.setattr(BlockIndex, "_connect", locked_once)
    with DiskStore(folder) as store:
        assert is_whole(store)


def test_a_commit_that_fails_after_the_file_moved(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, failures = BlockIndex._attempt, [sqlite3.DatabaseError("database disk image is malformed")]

    def failing_once(self: BlockIndex, work: Callable[[Any], object], write: bool) -> object:
        def failing_work(cache: object) -> object:
            done = work(cache)
            if failures:
                raise failures.pop()
            return done

        return attempt(self, failing_work, write)

    block = make_block(9)
    monkeypatch.setattr(BlockIndex, "_attempt", failing_once)
    assert store.put(block)
    assert not failures
    assert same(store.get(block.key), block)
    assert store.delete(block.key)
    assert is_whole(store)


def test_a_block_that_another_process_just_put_never_vanishes(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, publish, unlink, seen = make_block(9), store.index.publish, os.unlink, []

    def late(*args: Any) -> int:
        with DiskStore(folder) as other:
            other.put(block)
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", lambda path, **kwargs: (seen.append(str(path)), unlink(path, **kwargs))[1])
            return publish(*args)

    monkeypatch.setattr(store.index, "publish", late)
    assert store.put(block)
    assert [path for path in seen if path.endswith(".kvb")] == []
    assert same(store.get(block.key), block)
    assert store.stats().blocks == len(BLOCKS) + 1
    assert store.check() == []


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    sql(folder, "UPDATE Cache SET mode = 4, filename = NULL, value = ? WHERE key = ?", bomb, BLOCKS[0].key)
    sql(folder, "INSERT INTO Cache (key, raw, access_time, mode, value) VALUES (?, 0, 0, 4, ?)", bomb, bomb)
    with DiskStore(folder) as store:
        assert len([store.get(block.key) for block in BLOCKS]) == 5
        store.check(fix=True)
        assert is_whole(store)
    assert not (tmp_path / "exploded").exists()


def test_nothing_is_pickled() -> None:
    disk = BlockDisk("unused")
    for refused in (lambda: disk.put(("a", 1)), lambda: disk.store({"a": 1}, False), lambda: disk.get(b"x", False)):
        with pytest.raises(RefusedRow):
            refused()


@pytest.mark.parametrize("name", ["../../victim", "/{0}/victim", "../blocks/../../victim", "victim"])
def test_a_row_cannot_make_us_remove_another_file(folder: Path, tmp_path: Path, name: str) -> None:
    victims = [folder.parent / "victim", folder / "victim", folder / "index" / "victim"]
    for victim in victims:
        victim.write_text("x")
    sql(folder, "UPDATE Cache SET filename = ? WHERE key = ?", name.format(folder.parent), BLOCKS[0].key)
    with DiskStore(folder) as store:
        store.delete(BLOCKS[0].key)
        store.clear()
    assert all(victim.exists() for victim in victims[:2])


def test_tampered_settings_are_survived(folder: Path) -> None:
    for key, value in [("size", "many"), ("eviction_policy", "x"), ("disk_unknown", 1), ("count", None)]:
        sql(folder, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
        with DiskStore(folder) as store:
            store.check(fix=True)
            assert is_whole(store), key


def test_use_is_remembered_over_a_restart(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.get(BLOCKS[0].key)
    size = len(encode_block(BLOCKS[0]))
    with DiskStore(folder, 2 * size) as store:
        assert store.put(make_block(9, tags=("doc-9",)))  # a lower limit applies from the next write on
        assert sorted(store.keys()) == sorted([BLOCKS[0].key, make_block(9).key])
        assert store.stats().evictions == 4


def test_sizes_add_up_whatever_happens(tmp_path: Path) -> None:
    rng = random.Random(0)
    blocks = [make_block(i, tokens=1 + i % 7) for i in range(20)]
    limit = 6000
    with DiskStore(tmp_path, limit) as store:
        for _ in range(150):
            block = rng.choice(blocks)
            rng.choice([store.put, store.put, lambda b: store.get(b.key), lambda b: store.delete(b.key)])(block)
            on_disk = sum(path.stat().st_size for path in store.files.walk())
            assert on_disk <= limit
        stats = store.stats()
        assert (stats.bytes, stats.blocks) == (on_disk, len(list(store.files.walk())))
        assert stats.evictions > 0
        assert store.check() == []
