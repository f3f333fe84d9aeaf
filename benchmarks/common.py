"""What the benchmarks share: environment, texts, statistics, result files."""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Hardware and versions, as every result file reports them."""
    import torch
    import transformers

    import kvboost_rag

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvboost_rag": kvboost_rag.__version__,
    }


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles, minimum and maximum."""
    ordered = sorted(values)
    q1, median, q3 = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else (ordered[0],) * 3
    return {"median": median, "q1": q1, "q3": q3, "min": ordered[0], "max": ordered[-1], "n": len(ordered)}


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def prose(seed: int = 0) -> list[str]:
    """Real English paragraphs without any download: Python's own reference texts, shuffled."""
    from pydoc_data.topics import topics

    paragraphs = [p.strip() for text in topics.values() for p in text.split("\n\n") if len(p.strip()) > 80]
    random.Random(seed).shuffle(paragraphs)
    return paragraphs


def pool_of_chunks(encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], count: int, tokens: int):
    """``count`` chunks of real text that encode to exactly ``tokens`` ids each (after stripping)."""
    chunks: list[str] = []
    text = "\n\n".join(prose())
    ids = encode(text)
    at = 0
    while len(chunks) < count:
        for n in range(tokens, tokens + 40):
            chunk = decode(ids[at : at + n]).strip()
            if len(encode(chunk)) == tokens and "\ufffd" not in chunk:
                chunks.append(chunk)
                break
        at += tokens + 40
    return chunks
