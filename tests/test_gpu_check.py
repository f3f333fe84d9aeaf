"""``make gpu-check`` cannot run here; what it runs can, over toy shapes: every part, and what watches over the parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark folder is no package: its files import one another by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check
    import gpu_machine
    import gpu_models
    import gpu_parts

    return type("Scripts", (), {"check": gpu_check, "machine": gpu_machine, "models": gpu_models, "parts": gpu_parts})


@pytest.mark.parametrize("part", ["environment", "kernels", "streaming", "reuse", "attention", "paged", "packing"])
def test_every_part_over_toy_shapes(part: str, scripts: Any, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    notes = scripts.machine.Notes(file)
    run = getattr(scripts.parts, part, None) or getattr(scripts.models, part)
    run(scripts.machine.Machine(smoke=True), notes)
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
    if part == "packing":
        assert found["counts"]["packed_chunks"] > 0


def test_every_part_has_a_time_limit_and_a_function(scripts: Any) -> None:
    for part, seconds in scripts.check.PARTS.items():
        assert hasattr(scripts.parts, part) or hasattr(scripts.models, part)
        assert 0 < seconds < scripts.check.LIMIT_S
    assert scripts.check.LIMIT_S < 9 * 60


def test_all_tests_for_a_device_are_run(scripts: Any) -> None:
    """They are named one by one: the rest may not be importable on a bare machine."""
    marked = [f for f in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in f.read_text(encoding="utf-8")]
    here = {str(Path(__file__).relative_to(ROOT))}
    assert {str(f.relative_to(ROOT)) for f in marked} - here == set(scripts.parts.gpu_tests())
    assert scripts.parts.gpu_tests()


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
