"""A new process gets the same hits and the same logits; a killed warm-up is continued, not repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engine.helpers import DOCS, chat, make_engine, prepared
from tests.engine.workers import KILLED_AT, PROMPT, TEXTS, ask, warm

ROOT = Path(__file__).resolve().parents[2]


def elsewhere(role: str, folder: Path) -> Any:
    """Run a worker in a process of its own; its result, or the signal that ended it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.workers", role, str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode < 0:
        return signal.Signals(-done.returncode)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_process_gets_the_same_hits_and_the_same_logits(tmp_path: Path) -> None:
    assert warm(str(tmp_path)) == {"stored": len(TEXTS), "skipped": 0}
    here, there = ask(str(tmp_path)), elsewhere("ask", tmp_path)
    assert here["outcomes"] == ["hit"] * 3
    assert there == here, "bit for bit, on the same machine"


def test_a_killed_warm_up_is_continued_by_another_process(tmp_path: Path) -> None:
    undisturbed, broken = tmp_path / "undisturbed", tmp_path / "broken"
    warm(str(undisturbed))
    assert elsewhere("die", broken) == signal.SIGKILL
    with make_engine(store=broken) as engine:
        assert len(list(engine.store.keys())) == KILLED_AT
        assert engine.store.check() == []
    assert warm(str(broken)) == {"stored": len(TEXTS) - KILLED_AT, "skipped": KILLED_AT}
    one, two = ask(str(undisturbed)), ask(str(broken))
    assert one["outcomes"] == two["outcomes"] == ["hit"] * 3
    gap = torch.tensor(one["logits"]) - torch.tensor(two["logits"])
    assert gap.abs().max() < 1e-5, "batches differ, so rounding may"
    assert one["token_ids"] == two["token_ids"]


def test_disk_and_memory_give_the_same_logits(tmp_path: Path) -> None:
    memory = make_engine()
    memory.warm(TEXTS, batch_tokens=300)
    warm(str(tmp_path))
    with make_engine(store=tmp_path, memory_bytes=0) as disk:
        one, two = (prepared(e, PROMPT)[0].logits for e in (memory, disk))
        assert torch.equal(one, two)


def test_a_damaged_block_is_a_miss_and_the_answer_is_right(tmp_path: Path) -> None:
    with make_engine(store=tmp_path, memory_bytes=0) as engine:
        engine.warm(DOCS)
        good = engine.generate(chat(), max_new_tokens=6, reuse="off")
        for number, file in enumerate(sorted(tmp_path.glob("blocks/*/*"))):
            data = bytearray(file.read_bytes())
            data[-50 - number] ^= 4
            file.write_bytes(data[: len(data) // (1 + number % 2)])
        result = engine.generate(chat(), max_new_tokens=6)
        assert [c.outcome for c in result.report.chunks] == ["miss"] * 4
        assert all(c.reason.startswith("damaged") for c in result.report.chunks)
        assert result.token_ids == good.token_ids or result.report.exact
        engine.forget()
        assert engine.generate(chat(), max_new_tokens=1).report.hits == 4, "stored again after the answer"


def test_the_frozen_context_survives(tmp_path: Path) -> None:
    """The canonical head's ids are the store's, so that a template with a date in it does not empty the store."""
    with make_engine(store=tmp_path) as engine:
        engine.warm(DOCS[:1])
        name = next(iter(engine.store.keys()))
    with make_engine(store=tmp_path) as engine:
        assert engine.encoder().key(engine.encoder().tokenize(DOCS[0])) == name
