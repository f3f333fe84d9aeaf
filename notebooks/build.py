"""Build the notebooks from their sources, outputs stored: ``python notebooks/build.py [NAME ...] [--check]``.

A source is ``notebooks/NAME.py`` (see ``convert.py``), its notebook ``notebooks/NAME.ipynb``. NAME may be shortened to
its number. ``--check`` writes nothing: it runs every notebook and fails where a cell fails, where one takes longer than
the budget, or where a stored notebook is not what its source says.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from convert import KERNEL, notebook, same_source

BUDGET_S = 60.0
HANG_S = 600  # no single cell waits longer than this, however slow the machine
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
# Progress bars, and the warning of the library that draws them: noise in a document.
_NOISE = re.compile(r"^.*(it/s\]|Loading weights|TqdmWarning|import tqdm).*\n?", re.MULTILINE)
LONG_REPR = 200  # characters of a repr that stands behind a picture of the same object


def names() -> list[str]:
    """All notebooks, in reading order."""
    return sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))


def fresh(name: str) -> NotebookNode:
    """The notebook that the source of ``name`` describes, not yet run."""
    return notebook((FOLDER / f"{name}.py").read_text(encoding="utf-8"))


def stored(name: str) -> NotebookNode | None:
    """The notebook on disk, or None."""
    path = FOLDER / f"{name}.ipynb"
    return nbformat.read(path, as_version=4) if path.exists() else None


def execute(name: str) -> tuple[NotebookNode, float]:
    """Run ``name`` in a fresh kernel, in this folder; returns the notebook with outputs and the seconds it took.

    Raises:
        CellExecutionError: a cell failed.
    """
    book = fresh(name)
    environment = {**os.environ, **QUIET, "PYTHONPATH": _python_path()}
    client = NotebookClient(book, timeout=HANG_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    started, before = time.perf_counter(), _cpu_seconds()
    client.execute(env=environment)
    seconds = min(time.perf_counter() - started, _cpu_seconds() - before)
    tidy(book)
    return book, seconds


def _cpu_seconds() -> float:
    """CPU time of ended kernels: what a run takes on a machine that does nothing else, however busy this one is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _python_path() -> str:
    own = [str(FOLDER.parent), str(FOLDER.parent / "integrations")]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def tidy(book: NotebookNode) -> None:
    """Take out what differs from run to run and tells a reader nothing: times of cells, progress bars, long reprs."""
    for cell in book.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = list(_tidied(cell.outputs))
    book.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})


def _tidied(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Streams in one piece, without noise; everything else with short reprs and no metadata."""
    for name, group in groupby(outputs, key=lambda o: o.get("name")):
        if name is not None:
            text = "".join(o.text for o in group)
            text = _NOISE.sub("", text) if name == "stderr" else text
            if text.strip():
                yield nbformat.v4.new_output("stream", name=name, text=text)
            continue
        for output in group:
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            if len(data) > 1 and len(data.get("text/plain", "")) > LONG_REPR:
                data["text/plain"] = data["text/plain"][:LONG_REPR] + "…"
            yield output


def build(name: str) -> None:
    """Run ``name`` and store it."""
    book, seconds = execute(name)
    nbformat.validate(book)
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(book, path)
    print(f"{name}: {seconds:.0f} s, {path.stat().st_size / 1024:.0f} KiB")


def check(name: str) -> list[str]:
    """What is wrong with ``name``: drift from its source, a failing cell, too slow."""
    problems = []
    book = stored(name)
    if book is None or not same_source(book, fresh(name)):
        problems.append(f"{name}.ipynb is not what its source says; run: python notebooks/build.py {name}")
    try:
        _, seconds = execute(name)
    except CellExecutionError as error:
        return [*problems, f"{name}: {error}"]
    print(f"{name}: {seconds:.0f} s")
    if seconds > BUDGET_S:
        problems.append(f"{name}: took {seconds:.0f} s, more than {BUDGET_S:.0f} s")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where something is wrong")
    args = parser.parse_args()
    chosen = [n for n in names() if not args.names or any(n.startswith(Path(given).stem) for given in args.names)]
    if not chosen:
        parser.error(f"no such notebook; there are: {', '.join(names())}")
    problems: list[str] = []
    for name in chosen:
        if args.check:
            problems += check(name)
        else:
            build(name)
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
