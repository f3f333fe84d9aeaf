"""Everything that needs a CUDA device, in one call under nine minutes: tests, kernels, streaming, time to first token.

    make gpu-check                                        (or, without .venv: PYTHONPATH=. python benchmarks/gpu_check.py)
    PYTHONPATH=. python benchmarks/gpu_check.py --smoke   the same code over toy shapes on the CPU's stand-in device

Nothing is downloaded or installed: it runs where torch and transformers are, over random weights in real shapes. Each
part is a process of its own with its own time limit: one that hangs, runs out of memory or takes CUDA down with it costs
the others nothing, and what it had measured by then is kept. ``results/gpu_check.json`` (or ``--out``) is written after
every part. The full run has not been made yet (no GPU so far).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = HERE / "results" / "gpu_check.json"
LIMIT_S = 530  # all parts together
LEAST_S = 15  # no part begins with less

# Parts in the order in which they run, with the most seconds that each may take.
PARTS: dict[str, int] = {
    "environment": 40, "tests": 150, "kernels": 50, "streaming": 150, "reuse": 140, "attention": 80, "paged": 70, "packing": 60,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="toy shapes on the CPU; no figure means anything")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="names of parts")
    parser.add_argument("--out", type=Path, help="where the json goes (default: benchmarks/results; smoke: nowhere)")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # this process is one part
    args = parser.parse_args()
    if args.part:
        return run_part(args.part, args.smoke, args.out)
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing to check (--smoke runs the script itself over toy shapes)", file=sys.stderr)
        return 0
    out = args.out or (None if args.smoke else OUT)
    result: dict[str, Any] = {"smoke": args.smoke, "parts": {}}
    check(
        ["environment", *args.only] if args.only else list(PARTS),
        lambda part, file: command_of(part, file, args.smoke),
        result,
        out,
    )
    failed = [k for k, v in result["parts"].items() if v.get("failed")]
    print(f"written to {out}" if out else "nothing written (smoke)")
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def command_of(part: str, file: Path, smoke: bool) -> list[str]:
    flags = ["--smoke"] if smoke else []
    return [sys.executable, str(Path(__file__).resolve()), "--part", part, "--out", str(file), *flags]


def check(
    parts: Iterable[str], command: Callable[[str, Path], list[str]], result: dict[str, Any], out: Path | None,
    *, limit_s: float = LIMIT_S, least_s: float = LEAST_S,
) -> None:  # fmt: skip
    """Run ``parts`` one after the other into ``result["parts"]``; ``out`` holds all that is known at any time."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvboost-gpu-") as folder:
        for part in parts:
            left = limit_s - (time.perf_counter() - started)
            if left < least_s:
                result["parts"][part] = {"left_out": f"{left:.0f} s were left", "failed": True}
            else:
                print(f"{part} …", file=sys.stderr, flush=True)
                file = Path(folder) / f"{part}.json"
                result["parts"][part] = watch(command(part, file), file, min(PARTS.get(part, left), left))
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(result, indent=1) + "\n")


def watch(command: list[str], file: Path, limit_s: float) -> dict[str, Any]:
    """Run one part; what it noted in ``file``, its time, and why it failed if it did."""
    begun = time.perf_counter()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *stand_ins(), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its own children too
                child.wait()
        log.seek(0)
        tail = log.read()[-3000:].decode(errors="replace")
    noted: dict[str, Any] = {}
    if file.exists():
        noted = json.loads(file.read_text())
    noted["seconds_taken"] = round(time.perf_counter() - begun, 1)
    if code != 0:
        noted |= {"failed": True, "exit": code, "log": tail}
    return noted


def stand_ins() -> list[str]:
    """Folders of modules that the library needs, and that a machine with nothing but torch and transformers lacks."""
    return [] if importlib.util.find_spec("xxhash") else [str(HERE / "bare")]


def run_part(name: str, smoke: bool, file: Path | None) -> int:
    """This process is the part ``name``."""
    from gpu_machine import Machine, Notes

    part, notes = function_of(name), Notes(file)
    try:
        part(Machine(smoke), notes)
    except Exception as e:
        notes.add(error=f"{type(e).__name__}: {e}", trace=traceback.format_exc()[-2000:])
        return 1
    return 1 if notes.values.get("ok") is False or has_error(notes.values) else 0


def function_of(part: str) -> Callable[..., None]:
    """What measures ``part``."""
    import gpu_models
    import gpu_parts
    import gpu_reuse

    found = (getattr(module, part, None) for module in (gpu_parts, gpu_reuse, gpu_models))
    return next(function for function in found if function is not None)


def has_error(value: Any) -> bool:
    """Whether any figure of a part is an error."""
    if isinstance(value, dict):
        return "error" in value or any(has_error(v) for v in value.values())
    return isinstance(value, list) and any(has_error(v) for v in value)


if __name__ == "__main__":
    sys.exit(main())
