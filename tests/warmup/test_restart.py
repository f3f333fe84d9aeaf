"""A warm-up that is killed in the middle leaves a healthy store, and another process goes on from there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvboost_rag.store.base import Miss
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.warmup import warm
from tests.warmup.fakes import FakeEncoder, text_of

TEXTS = [text_of(i, words=1 + i % 20) for i in range(120)]
VICTIM = """
import os, signal, sys
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.warmup import warm
from tests.warmup.fakes import FakeEncoder, text_of

class Killed(FakeEncoder):
    def encode(self, *args, **kwargs):
        if len(self.batches) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(*args, **kwargs)

encoder = Killed(DiskStore(sys.argv[1], min_free_bytes=0))
warm(encoder, [text_of(i, words=1 + i % 20) for i in range(120)], batch_tokens=200)
"""


def test_after_sigkill_another_process_does_the_rest(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", VICTIM, str(tmp_path / "kv")], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    with DiskStore(tmp_path / "kv", min_free_bytes=0) as store:
        there = len(list(store.keys()))
        assert 0 < there < len(TEXTS)
        encoder = FakeEncoder(store)  # type: ignore[arg-type]
        report = warm(encoder, TEXTS)
        assert (report.skipped, report.stored) == (there, len(TEXTS) - there)
        assert store.check() == []
        assert not any(isinstance(store.get(encoder.key(encoder.tokenize(text))), Miss) for text in TEXTS)
        assert len(encoder.registered) == len(TEXTS)
