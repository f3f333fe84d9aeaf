"""What the other processes of the restart tests do: ``python -m tests.engine.workers ROLE FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from kvboost_rag.store.base import BlockStore
from tests.engine.helpers import DOCS, chat, make_engine

TEXTS = [f"{doc} (copy {i})" for i in range(6) for doc in DOCS]
KILLED_AT = 7  # blocks that are stored when the killer strikes
PROMPT = chat([TEXTS[20], TEXTS[1], TEXTS[6]])


def warm(folder: str) -> dict[str, object]:
    with make_engine(store=folder) as engine:
        report = engine.warm(TEXTS, batch_tokens=300)
        return {"stored": report.stored, "skipped": report.skipped}


def die(folder: str) -> None:
    """Warm, and be killed in the middle of it, in the call that would store one more block."""
    engine = make_engine(store=folder)
    put, stored = BlockStore.put, [0]
    real = type(engine.store).put

    def deadly(self: BlockStore, block: object) -> bool:
        if stored[0] == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        stored[0] += 1
        return real(self, block)  # type: ignore[arg-type]

    assert put is not real
    type(engine.store).put = deadly  # type: ignore[method-assign,assignment]
    engine.warm(TEXTS, batch_tokens=300)


def ask(folder: str) -> dict[str, object]:
    with make_engine(store=folder) as engine:
        score = engine.score(PROMPT, [40, 50, 60], repair="balanced", logits=True)
        answer = engine.generate(PROMPT, max_new_tokens=8)
        assert score.logits is not None
        return {
            "outcomes": [c.outcome for c in score.report.chunks],
            "logits": score.logits.double().tolist(),
            "token_ids": answer.token_ids,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"warm": warm, "die": die, "ask": ask}[sys.argv[1]](sys.argv[2])))
