"""The notebooks: stored outputs belong to the sources, show no machine, stay small; and they run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need kvboost-rag[notebooks]")
pytest.importorskip("nbclient", reason="notebooks need kvboost-rag[notebooks]")
pytest.importorskip("ipykernel", reason="notebooks need kvboost-rag[notebooks]")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
FIRST = "01_quickstart"
# Absolute paths of homes, checkouts and temporary folders, as they stand in tracebacks, warnings and printed paths.
MACHINE = re.compile(r"(/(home|root|work|tmp|Users|usr|opt|var|private|mnt)/\S+)|([A-Z]:\\\\?\w+)|site-packages")
TEXT_LIMIT = 4_000  # characters of one text output
TOTAL_LIMIT = 1_500_000  # bytes of all notebooks


def _module(name: str) -> ModuleType:
    """``notebooks/NAME.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _module("build")
convert = _module("convert")


def _outputs(name: str) -> list[Any]:
    book = build.stored(name)
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def _texts(output: Any) -> list[str]:
    data = output.get("data", {})
    return [output.get("text", ""), *(text for kind, text in data.items() if kind.startswith("text/"))]


def test_all_six_are_there() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]
    assert build.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_stored_notebook_is_what_its_source_says(name: str) -> None:
    book = build.stored(name)
    assert book is not None, f"run: python notebooks/build.py {name}"
    nbformat.validate(book)
    assert convert.same_source(book, build.fresh(name)), f"run: python notebooks/build.py {name}"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_none_is_an_error(name: str) -> None:
    code = [cell for cell in build.stored(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run once, from top to bottom"
    outputs = _outputs(name)
    assert len(outputs) >= len(code) / 3
    assert not [o for o in outputs if o.output_type == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_inside(name: str) -> None:
    data = [output.get("data", {}) for output in _outputs(name)]
    assert any("image/png" in d or "<div" in d.get("text/html", "") for d in data)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_show_no_path_of_a_machine(name: str) -> None:
    for output in _outputs(name):
        for text in _texts(output):
            assert not MACHINE.search(text), MACHINE.search(text)


@pytest.mark.parametrize("name", NAMES)
def test_text_outputs_are_small(name: str) -> None:
    for output in _outputs(name):
        assert len(output.get("text", "")) <= TEXT_LIMIT
        assert len(output.get("data", {}).get("text/plain", "")) <= TEXT_LIMIT


def test_all_notebooks_together_are_small() -> None:
    assert sum((FOLDER / f"{name}.ipynb").stat().st_size for name in NAMES) < TOTAL_LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_only_public_names_are_used(name: str) -> None:
    import kvboost_rag

    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert not re.findall(r"^\s*(?:from|import) kvboost_rag\.\S+", source, re.MULTILINE)
    for names in re.findall(r"^\s*from kvboost_rag import (.+)$", source, re.MULTILINE):
        assert {n.strip() for n in names.split(",")} <= set(kvboost_rag.__all__)


def test_a_changed_source_is_noticed() -> None:
    source = (FOLDER / f"{FIRST}.py").read_text(encoding="utf-8")
    book = build.stored(FIRST)
    assert not convert.same_source(book, convert.notebook(source.replace("Quickstart", "Slowstart")))
    assert not convert.same_source(book, convert.notebook(source + "\n# %%\nprint(1)\n"))


def test_the_light_format() -> None:
    source = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1  # %%\n\n\n# %%\n\n# %%\ny = 2\n"
    cells = list(convert.parse(source))
    assert cells == [("markdown", "# Title\n\ntext"), ("code", "x = 1  # %%"), ("code", "y = 2")]
    with pytest.raises(ValueError, match="before the first"):
        list(convert.parse("x = 1\n# %%\n"))
    with pytest.raises(ValueError, match="no comment"):
        list(convert.parse("# %% [markdown]\ntext\n"))


def test_tidy_keeps_what_a_reader_needs() -> None:
    new = nbformat.v4.new_output
    book = convert.notebook("# %%\n1\n")
    noise = "lib/tqdm/auto.py:21: TqdmWarning: no widgets\n  from .autonotebook import tqdm\nLoading weights: 3%\n"
    book.cells[0].outputs = [
        new("stream", name="stdout", text="a"),
        new("stream", name="stdout", text="b\n"),
        new("stream", name="stderr", text=noise.replace("from .autonotebook ", "") + "a warning that matters\n"),
        new("execute_result", data={"text/plain": "x" * 999, "text/html": "<p>x</p>"}, execution_count=1),
        new("execute_result", data={"text/plain": "y" * 999}, execution_count=1),
    ]
    build.tidy(book)
    out, talk, drawn, plain = book.cells[0].outputs
    assert out.text == "ab\n"
    assert talk.text == "a warning that matters\n"
    assert len(drawn.data["text/plain"]) <= build.LONG_REPR + 1
    assert len(plain.data["text/plain"]) == 999


SLOW = ("02", "06")  # what they show is tested elsewhere: warm-up and restart, verify


@pytest.mark.real_model
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n.startswith(SLOW) else n for n in NAMES])
def test_a_notebook_runs(name: str) -> None:
    """A cell that fails raises. Its time is looked at by ``notebooks/build.py --check``: a busy machine must not fail a
    test."""
    book, _ = build.execute(name)
    outputs = [o for cell in book.cells for o in cell.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) or "text/html" in o.get("data", {}) for o in outputs)
