"""Faults of the medium: damage, strangers, full disks. Never a wrong block, never an exception."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvboost_rag.errors import StoreError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import DiskStore, Miss
from kvboost_rag.store.disk_files import QUARANTINE_FILES
from tests.store.blocks import make_block, same


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store", 1 << 24) as store:
        yield store


def file_of(store: DiskStore, block: Block) -> Path:
    path = store.files.path(block.key)
    assert path is not None
    return path


def quarantined(store: DiskStore) -> list[str]:
    return sorted(path.name.split("-")[0] for path in store.files.quarantine.iterdir())


def test_a_new_process_finds_what_was_stored(tmp_path: Path) -> None:
    block = make_block(1)
    with DiskStore(tmp_path) as store:
        store.put(block)
        store.put_meta("head", b"[1, 2]")
    with DiskStore(tmp_path) as store:
        assert same(store.get(block.key), block)
        assert store.get_meta("head") == b"[1, 2]"
        assert store.stats().blocks == 1


def test_large_blocks_are_mapped(store: DiskStore) -> None:
    block = make_block(1, layers=16, tokens=64, head_dim=64)  # 512 KiB
    store.put(block)
    found = store.get(block.key)
    assert same(found, block)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    held = [store.get(block.key) for _ in range(20)]
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors  # a mapping holds no descriptor: thousands are fine
    store.delete(block.key)
    assert all(same(one, block) for one in held)  # an open mapping outlives its file's name


def test_everything_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with DiskStore(tmp_path / "new" / "store") as store:
            store.put(make_block(1))
            store.put_meta("head", b"1")
            found = [store.folder, *store.folder.rglob("*")]
            modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in found}
    finally:
        os.umask(old)
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_every_byte_of_a_stored_block_flipped_in_turn(store: DiskStore) -> None:
    block = make_block(1, tokens=2, layers=1)
    store.put(block)
    path, good = file_of(store, block), file_of(store, block).read_bytes()
    for i in range(len(good)):
        bad = bytearray(good)
        bad[i] ^= 0x41
        path.write_bytes(bad)
        miss = store.get(block.key)
        assert isinstance(miss, Miss), i
        assert miss.reason in ("damaged", "foreign")
        assert not path.exists()
    assert len(quarantined(store)) <= QUARANTINE_FILES
    assert store.put(block)
    assert same(store.get(block.key), block)
    assert store.check() == []


@pytest.mark.parametrize("keep", [0, 7, 60, 300, -1])
def test_a_truncated_file_is_damaged(store: DiskStore, keep: int) -> None:
    block = make_block(1)
    store.put(block)
    path = file_of(store, block)
    path.write_bytes(path.read_bytes()[:keep])
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "damaged"
    assert quarantined(store) == ["damaged"]
    assert store.get(block.key) == Miss("absent")
    assert (list(store.keys()), store.stats().bytes) == ([], 0)


def test_a_truncated_mapped_file_is_damaged(store: DiskStore) -> None:
    block = make_block(1, layers=16, tokens=64, head_dim=64)
    store.put(block)
    os.truncate(file_of(store, block), 300_000)
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "damaged"


@pytest.mark.parametrize("content", [b"GIF89a" * 100, bytes(1000)], ids=["picture", "zeros"])
def test_a_foreign_file_is_foreign(store: DiskStore, content: bytes) -> None:
    block = make_block(1)
    store.put(block)
    file_of(store, block).write_bytes(content)
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "foreign"
    assert quarantined(store) == ["foreign"]


def test_an_unknown_version_is_foreign(store: DiskStore) -> None:
    block = make_block(1)
    store.put(block)
    path = file_of(store, block)
    path.write_bytes(path.read_bytes().replace(b"kvboost_rag/3", b"kvboost_rag/9"))
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert (miss.reason, "version" in miss.detail) == ("foreign", True)


def test_a_renamed_block_is_a_mismatch(store: DiskStore) -> None:
    block, other = make_block(1), make_block(2)
    store.put(block)
    store.put(other)
    shutil.copy(file_of(store, other), file_of(store, block))
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert (miss.reason, other.key in miss.detail) == ("mismatch", True)
    assert quarantined(store) == ["mismatch"]
    assert same(store.get(other.key), other)


def test_a_file_replaced_meanwhile_is_not_set_aside(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1)
    store.put(block)
    path, good, read = file_of(store, block), file_of(store, block).read_bytes(), store.files.read
    path.write_bytes(b"damaged" * 20)

    def read_then_replaced(path: Path) -> object:
        result = read(path)
        path.with_suffix(".new").write_bytes(good)
        path.with_suffix(".new").rename(path)  # as another process does that puts the block anew
        return result

    monkeypatch.setattr(store.files, "read", read_then_replaced)
    assert same(store.get(block.key), block)
    assert quarantined(store) == []


@pytest.mark.parametrize("field", ["fingerprint", "context", "salt"])
def test_another_computation_of_the_same_text_never_hits(store: DiskStore, field: str) -> None:
    block = make_block(1)
    other = make_block(1, **{field: "other"})
    store.put(block)
    assert store.get(other.key) == Miss("absent")
    shutil.copytree(file_of(store, block).parent, file_of(store, other).parent, dirs_exist_ok=True)
    shutil.copy(file_of(store, block), file_of(store, other))
    miss = store.get(other.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "mismatch"


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_what_is_not_a_file_is_foreign(store: DiskStore, kind: str, tmp_path: Path) -> None:
    block = make_block(1)
    path = file_of(store, block)
    path.parent.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(encode_block(block))
    {"folder": path.mkdir, "link": lambda: path.symlink_to(outside), "fifo": lambda: os.mkfifo(path)}[kind]()
    miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "foreign"
    assert store.put(block)
    assert same(store.get(block.key), block)
    assert outside.exists()


def test_check_names_each_problem_and_mends_it(store: DiskStore) -> None:
    blocks = [make_block(i) for i in range(6)]
    for block in blocks:
        store.put(block)
    store.put_meta("head", b"1")
    damaged, foreign, mismatch, missing, orphan, sound = blocks
    file_of(store, damaged).write_bytes(file_of(store, damaged).read_bytes()[:-1])
    file_of(store, foreign).write_bytes(b"hello " * 20)
    shutil.copy(file_of(store, sound), file_of(store, mismatch))
    file_of(store, missing).unlink()
    content = file_of(store, orphan).read_bytes()
    store.delete(orphan.key)
    file_of(store, orphan).write_bytes(content)
    (store.files.blocks / "notes.txt").write_text("mine")
    (store.files.tmp / "1-abc.tmp").write_bytes(b"half a blo")
    store.manifest.path("head").write_bytes(b"junk")
    expected = {
        ("damaged", damaged.key),
        ("foreign", foreign.key),
        ("mismatch", mismatch.key),
        ("missing file", missing.key),
        ("orphan file", orphan.key),
        ("foreign", "blocks/notes.txt"),
        ("orphan file", "tmp/1-abc.tmp"),
        ("damaged", "meta/" + store.manifest.path("head").name),
    }
    found = store.check()
    assert {(p.kind, p.where) for p in found if p.kind != "index"} == expected
    assert not any(p.fixed for p in found)
    assert all(p.fixed for p in store.check(fix=True))
    assert store.check() == []
    assert sorted(store.keys()) == sorted([orphan.key, sound.key])
    assert same(store.get(orphan.key), orphan)
    assert store.get_meta("head") is None
    assert store.put_meta("head", b"2") == b"2"


def test_a_file_without_a_row_is_served_and_gets_one(store: DiskStore) -> None:
    block = make_block(1, tags=("doc",))
    store.put(block)
    content = file_of(store, block).read_bytes()
    store.delete(block.key)
    file_of(store, block).write_bytes(content)
    assert same(store.get(block.key), block)
    assert list(store.keys()) == [block.key]
    assert store.check() == []


def fail(number: int) -> object:
    def raising(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return raising


@pytest.mark.parametrize("seam", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_write_is_skipped_with_one_warning(
    store: DiskStore, seam: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, block, other = make_block(1), make_block(2), make_block(3)
    store.put(kept)
    with monkeypatch.context() as patched:
        patched.setattr(os, seam, fail(number))
        assert not store.put(block)
        assert not store.put(other)
        assert same(store.get(kept.key), kept)
        assert store.get(block.key) == Miss("absent")
    assert len([r for r in caplog.records if "not stored" in r.message]) == 1
    assert store.stats().skipped_writes == 2
    assert list(store.files.tmp.iterdir()) == []
    assert store.check() == []
    assert store.put(block)


def test_reads_of_one_request_run_at_once(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, together = [make_block(i) for i in range(2)], threading.Barrier(2)
    for block in blocks:
        store.put(block)
    read = store.files.read

    def waiting(path: Path) -> object:
        together.wait(30)  # each read waits for the other one to begin
        return read(path)

    monkeypatch.setattr(store.files, "read", waiting)
    found = store.get_many([block.key for block in blocks])
    assert [same(one, block) for one, block in zip(found, blocks, strict=True)] == [True, True]


def test_short_writes_are_completed(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    block, write = make_block(1), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
        assert store.put(block)
    assert same(store.get(block.key), block)


def test_the_free_space_floor_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DiskStore(tmp_path, min_free_bytes=1 << 60) as store:
        assert not store.put(make_block(1))
        assert not store.put(make_block(2))
        assert list(store.files.walk()) == []
    assert len([r for r in caplog.records if "not stored" in r.message]) == 1


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, where we may mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no free page."""
    while free := shutil.disk_usage(folder).free:
        (folder / f"filler-{free}").write_bytes(bytes(free))


def test_a_disk_that_really_is_full(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = [make_block(i, layers=16, tokens=64, head_dim=32) for i in range(12)]  # 256 KiB each
    with DiskStore(tiny_disk / "store", min_free_bytes=0) as store:
        put = [store.put(block) for block in blocks]
        assert True in put
        assert False in put
        for block, stored in zip(blocks, put, strict=True):
            assert same(store.get(block.key), block) == stored
        assert len([r for r in caplog.records if "not stored" in r.message]) == 1
        fill(tiny_disk)
        store.put_meta("head", b"x" * 5000)
        assert store.get_meta("head") == b"x" * 5000
    fill(tiny_disk)
    with DiskStore(tiny_disk / "store", min_free_bytes=0) as store:  # opened while full: still answers
        assert same(store.get(blocks[0].key), blocks[0])
        assert not store.put(make_block(99))
        for filler in tiny_disk.glob("filler-*"):
            filler.unlink()
        assert store.delete(blocks[0].key)
        assert store.put(make_block(99, tokens=32))
        assert [p for p in store.check(fix=True) if not p.fixed] == []
        assert store.check() == []


def test_no_descriptors_left_is_no_reason_to_throw_a_block_away(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1)
    store.put(block)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail(errno.EMFILE))
        miss = store.get(block.key)
    assert isinstance(miss, Miss)
    assert miss.reason == "unavailable"
    assert same(store.get(block.key), block)


def test_a_damaged_manifest_entry_is_unset(store: DiskStore) -> None:
    store.put_meta("head", b"1")
    path = store.manifest.path("head")
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        assert store.get_meta("head") is None
    assert store.put_meta("head", b"2") == b"2"


def test_a_folder_of_a_newer_layout_is_refused(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    (tmp_path / "store-format").write_text("kvboost_rag store 2\n")
    with pytest.raises(StoreError, match="layout 2"):
        DiskStore(tmp_path)


def test_closing_twice(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.get_many(["a", "b", "c"])
    store.close()
    store.close()
