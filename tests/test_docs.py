"""Documents say what the code and the result files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tables_equal_the_committed_results() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_no_table_is_empty() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "correctness.md"):
        text = page.read_text(encoding="utf-8")
        for part in text.split("<!-- ")[1:]:
            marker = part.split(":start -->\n")
            if len(marker) == 2:
                assert marker[1].strip(), f"{page.name}: {marker[0]} is empty"


def test_changelog_names_the_version() -> None:
    import kvboost_rag

    assert (
        "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
        or kvboost_rag.__version__ in (ROOT / "CHANGELOG.md").read_text()
    )
