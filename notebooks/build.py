"""Build the notebooks from their sources, outputs stored: ``python notebooks/build.py [NAME ...] [--check]``.

A source is ``notebooks/NAME.py`` (see ``convert.py``), its notebook ``notebooks/NAME.ipynb``. NAME may be shortened to
its number. ``--check`` writes nothing: it runs every notebook and fails where a cell fails, where one takes longer than
the budget, or where a stored notebook is not what its source says.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from convert import notebook, same_source

BUDGET_S = 60.0
HANG_S = 600  # no single cell waits longer than this, however slow the machine
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
# Progress bars redraw with a carriage return: only their last state would be worth keeping, and that is noise too.
_BAR = re.compile(r"^.*(\r|it/s\]|Loading weights).*\n?", re.MULTILINE)


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
    started = time.perf_counter()
    client.execute(env=environment)
    seconds = time.perf_counter() - started
    tidy(book)
    return book, seconds


def _python_path() -> str:
    own = [str(FOLDER.parent), str(FOLDER.parent / "integrations")]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def tidy(book: NotebookNode) -> None:
    """Take out what differs from run to run and tells a reader nothing: times of cells, progress bars."""
    for cell in book.cells:
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.get("name") == "stderr":
                output.text = _BAR.sub("", output.text)
            output.get("metadata", {}).clear()
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr" or o.text.strip()]
    book.metadata = nbformat.from_dict({k: book.metadata[k] for k in ("kernelspec", "language_info")})
    book.metadata.language_info = nbformat.from_dict({"name": "python"})


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
