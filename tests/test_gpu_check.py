"""``make gpu-check`` cannot run here; what it runs can, over toy shapes: every part, and what watches over the parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark folder is no package: its files import one another by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check
    import gpu_machine
    import gpu_parts

    return type("Scripts", (), {"check": gpu_check, "machine": gpu_machine, "parts": gpu_parts})


@pytest.mark.parametrize("part", ["environment", "kernels", "streaming", "reuse", "attention", "paged", "packing"])
def test_every_part_over_toy_shapes(part: str, scripts: Any, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    notes = scripts.machine.Notes(file)
    scripts.check.function_of(part)(scripts.machine.Machine(smoke=True), notes)
    found = json.loads(file.read_text())
    assert not scripts.check.has_error(found), found
    assert found.get("ok", True) is True
    expected = {
        "environment": ["torch", "transformers", "commit", "cpu"],
        "kernels": ["256x512", "512x256"],
        "streaming": ["plan", "decode", "ttft", "streamer"],
        "reuse": ["bus", "2x32"],
        "attention": ["operation", "prefill_eager_128", "prefill_sdpa_128", "prefill_ours_128"],
        "paged": ["whole", "paged", "relative_logit_error", "same_tokens"],
        "packing": ["packed", "padded", "largest_gap", "others_unchanged"],
    }[part]
    assert set(expected) <= set(found)
    if part == "streaming":
        assert found["streamer"]["bytes_copied"] > 0
    if part == "paged":
        assert found["paged"]["host_tokens"] > 0
        assert found["same_tokens"] == 32
    if part == "reuse":
        assert {"fast_vram", "balanced_vram", "floor"} <= set(found["2x32"]["over_floor"])
        assert (found["2x32"]["tier"]["blocks"], found["2x32"]["tier"]["hits"]) == (2, 2 + 4 * 3), "all but the first"
    if part == "packing":
        assert found["counts"]["packed_chunks"] > 0


def test_every_part_has_a_time_limit_and_a_function(scripts: Any) -> None:
    for part, seconds in scripts.check.PARTS.items():
        assert callable(scripts.check.function_of(part))
        assert 0 < seconds < scripts.check.LIMIT_S
    assert scripts.check.LIMIT_S < 9 * 60


def test_all_tests_for_a_device_are_run(scripts: Any) -> None:
    """They are named one by one: the rest may not be importable on a bare machine."""
    marked = [f for f in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in f.read_text(encoding="utf-8")]
    here = {str(Path(__file__).relative_to(ROOT))}
    assert {str(f.relative_to(ROOT)) for f in marked} - here == set(scripts.parts.gpu_tests())
    assert scripts.parts.gpu_tests()


def bare_python(folder: Path) -> Path:
    """An interpreter that has torch, transformers, pytest and what these bring; nothing else of this environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    target = sorted(folder.glob("lib*/python*/site-packages"))[0]  # lib64 is a link to lib
    todo, done = ["torch", "transformers", "pytest"], set[str]()
    while todo:
        name = todo.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
        for top in tops if found.name not in done else ():
            here = Path(str(found.locate_file(top)))
            if here.exists() and not (target / top).exists():
                (target / top).symlink_to(here)
        wanted = [Requirement(r) for r in found.requires or [] if found.name not in done]
        todo += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
        done.add(found.name)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="links")
def test_nothing_but_torch_transformers_and_pytest_is_needed(tmp_path: Path) -> None:
    python, out = bare_python(tmp_path / "bare"), tmp_path / "all.json"
    lacks = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('xxhash') is not None)"]
    subprocess.run(lacks, check=True, env={**os.environ, "PYTHONPATH": ""})
    command = [python, "benchmarks/gpu_check.py", "--smoke", "--only", "tests", "packing", "--out", out]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, out.read_text() if out.exists() else run.stderr


HANGS = """
import json, signal, subprocess, sys
open(sys.argv[1], "w").write(json.dumps({"rows": [1, 2]}))
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.pause()
"""
CRASHES = "import os, sys; print('no kernel image', file=sys.stderr, flush=True); os.abort()"
WORKS = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'rows': [3]}))"


def test_a_part_that_hangs_or_crashes_costs_the_others_nothing(scripts: Any, tmp_path: Path) -> None:
    programs = {"hangs": HANGS, "crashes": CRASHES, "works": WORKS}
    out = tmp_path / "results" / "all.json"
    result: dict[str, Any] = {"parts": {}}
    scripts.check.PARTS["hangs"] = 2
    try:
        scripts.check.check(
            programs, lambda part, file: [sys.executable, "-c", programs[part], str(file)], result, out, limit_s=60
        )
    finally:
        del scripts.check.PARTS["hangs"]
    parts = json.loads(out.read_text())["parts"]
    assert parts["hangs"]["rows"] == [1, 2], "what it had found is kept"
    assert parts["hangs"]["failed"]
    assert "stopped after 2 s" in parts["hangs"]["exit"]
    assert parts["crashes"]["failed"]
    assert "no kernel image" in parts["crashes"]["log"]
    assert parts["works"]["rows"] == [3]
    assert "failed" not in parts["works"]


def test_parts_that_no_time_is_left_for_are_named(scripts: Any, tmp_path: Path) -> None:
    result: dict[str, Any] = {"parts": {}}
    scripts.check.check(["works"], lambda part, file: ["false"], result, tmp_path / "all.json", limit_s=1)
    assert "left" in json.loads((tmp_path / "all.json").read_text())["parts"]["works"]["left_out"]


def test_one_failing_figure_fails_the_part_alone(scripts: Any, tmp_path: Path) -> None:
    notes = scripts.machine.Notes(tmp_path / "n.json")
    notes.try_to("first", lambda: 1 / 0)
    notes.try_to("second", lambda: {"seconds": 2.0})
    found = json.loads((tmp_path / "n.json").read_text())
    assert "ZeroDivisionError" in found["first"]["error"]
    assert found["second"] == {"seconds": 2.0}
    assert scripts.check.has_error(found)
    assert not scripts.check.has_error(found["second"])


# --- the tests for a device, on the stand-in ------------------------------------------------------------------------

INSTEAD = {
    '"cuda"': '"cpu"', ".cuda()": "", "pytestmark = pytest.mark.gpu": "", "torch.cuda.synchronize()": "pass",
    'find_spec("triton")': 'find_spec("no_such_module")', "engine.encoder()": "engine.encoder(packs=True)",
    "engine.warm(DOCS)": "engine.warm(DOCS, packs=True)",
}  # fmt: skip
STAND_IN = """

@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    from kvboost_rag.model.streaming import load
    from kvboost_rag.model.streaming.virtual import VirtualBackend

    monkeypatch.setattr(load, "choose_backend", lambda device, backend: backend or VirtualBackend(order="random"))
    from kvboost_rag import api
    from kvboost_rag.engine.carrier import carrier_for

    def carrier(adapter, carry, stand_in=None):
        return carrier_for(adapter, carry, stand_in or VirtualBackend(order="random"))

    monkeypatch.setattr(api, "carrier_for", carrier)
"""


@pytest.mark.slow
def test_what_the_tests_for_a_device_ask_can_be_answered(scripts: Any, tmp_path: Path) -> None:
    """A budget that planning refuses, or a count that cannot be, would be found on the one day that there is a GPU."""
    for i, file in enumerate(scripts.parts.gpu_tests()):
        text = (ROOT / file).read_text(encoding="utf-8")
        for old, new in INSTEAD.items():
            text = text.replace(old, new)
        (tmp_path / f"test_stand_in_{i}.py").write_text(text + STAND_IN, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    run = subprocess.run(
        [*command, "--rootdir", str(ROOT), "-k", "not long_decode and not page_locked_until", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout.splitlines()[-1]
