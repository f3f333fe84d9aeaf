"""Pipes where files should be: whoever opened one would wait for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvboost_rag.errors import StoreError
from kvboost_rag.store import DiskStore
from tests.store.blocks import make_block, same


def in_time(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that may be left behind: the fault that is looked for is a wait without end."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended, "it waits"
    if ended[0] is not None:
        raise ended[0]


@pytest.mark.parametrize("name", ["settings.json", "store-format", "tmp/1-a.tmp", ".lock", "index/cache.db", "meta"])
def test_a_pipe_in_a_store_s_folder_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    block = make_block(1)
    with DiskStore(tmp_path) as store:
        store.put(block)
        store.put_meta("name", b"value")
    path = next((tmp_path / "meta").iterdir()) if name == "meta" else tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def use() -> None:
        with DiskStore(tmp_path) as store:
            assert same(store.get(block.key), block)
            assert store.get_meta("name") == (None if name == "meta" else b"value")
            store.check(fix=True)
            assert store.check() == []

    in_time(use)


def test_a_pipe_as_the_file_of_known_texts_is_an_error_that_says_so(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    (tmp_path / "anchors.bin").unlink()
    os.mkfifo(tmp_path / "anchors.bin")
    with pytest.raises(StoreError, match="not a regular file"):
        in_time(lambda: DiskStore(tmp_path).close())
