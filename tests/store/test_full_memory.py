"""Host memory that is full: look-ups are misses, writes are skipped, nothing is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import torch
torch.set_num_threads(1)
from kvboost_rag.store import DiskStore, MemoryStore, Miss
from tests.store.blocks import make_block

block = make_block(5, layers=32, tokens=512, heads=8, head_dim=64)  # 64 MiB
memory = MemoryStore(1 << 30, compression="int4")
assert memory.put(block)
with DiskStore(sys.argv[1], compression="int4") as store:
    assert store.put(block)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)
    full = Miss("unavailable", "out of memory")
    assert store.get(block.key) == full
    assert store.open_many([block.key]) == [full]
    assert store.layers(block.key) == full
    assert memory.get(block.key) == full
    part = make_block(6, layers=2)
    assert not MemoryStore(1 << 30).put(type(block)(block.kv[:24], block.token_ids, block.header)), "a copy of 48 MiB"
    assert store.put(part) and store.contains(block.key)
    assert store.stats().misses == {"unavailable": 3}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's")
def test_full_memory_is_misses_and_skipped_writes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "block not stored: out of memory" in done.stderr
