from __future__ import annotations

import subprocess
import sys

import pytest

from kvboost_rag import __version__
from kvboost_rag.cli import COMMANDS
from kvboost_rag.cli.common import format_size, parse_duration, parse_size
from kvboost_rag.errors import UsageError
from tests.cli.conftest import run


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("20GiB", 20 << 30),
        ("20G", 20 << 30),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1.5KiB", 1536),
        ("2tib", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1 G i B", "nan", "1e9", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43200), ("2w", 1209600)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1y"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (20 << 30, "20.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


def test_help_names_every_command_and_each_has_help() -> None:
    assert all(name in run("--help").stdout for name in COMMANDS)
    for name in COMMANDS:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.stdout


@pytest.mark.parametrize("words", [["--help"], ["warmup", "--help"], ["ask", "-h"], ["store", "--help"]])
def test_help_loads_neither_torch_nor_transformers(words: list[str]) -> None:
    code = (
        "import sys\nfrom kvboost_rag.cli import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'langchain_text_splitters', 'pypdf', 'bs4'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert run("--version").stdout == f"kvboost-rag, version {__version__}\n"


def test_an_unknown_command_is_status_2() -> None:
    assert run("warmpu").exit_code == 2
