"""The tables in the documents are those of the committed result files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402

FILES = sorted(tables.RESULTS.glob("fidelity-*.json")) + sorted(tables.RESULTS.glob("deviation-*.json"))


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda p: p.name)
def test_a_document_shows_what_the_result_files_say(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tables.BLOCK.search(text), "no table is marked"
    assert tables.rendered(text) == text, "run python benchmarks/tables.py"


def test_a_changed_figure_makes_a_document_stale(tmp_path: Path) -> None:
    for file in FILES:
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    changed = tmp_path / "fidelity-squad-held.json"
    found = json.loads(changed.read_text(encoding="utf-8"))
    found["rows"]["balanced"]["kl_gold"] += 1.0
    changed.write_text(json.dumps(found), encoding="utf-8")
    text = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert tables.rendered(text, tmp_path) != text


def test_a_changed_figure_makes_the_store_s_page_stale(tmp_path: Path) -> None:
    for file in tables.RESULTS.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    text = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    assert tables.rendered(text, tmp_path) == text
    changed = tmp_path / "store.json"
    found = json.loads(changed.read_text(encoding="utf-8"))
    found["scale"]["1,000,000"]["open_ms"] += 1000.0
    changed.write_text(json.dumps(found), encoding="utf-8")
    assert tables.rendered(text, tmp_path) != text


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_result_files_hold_no_machine_paths(file: Path) -> None:
    assert not re.search(r'"/(home|root|tmp|work|mnt|Users)\b', file.read_text(encoding="utf-8"))


def test_every_picture_of_the_page_is_committed() -> None:
    text = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\(([\w-]+\.png)\)", text)
    assert pictures
    assert all(0 < (ROOT / "docs" / p).stat().st_size < 150_000 for p in pictures)
