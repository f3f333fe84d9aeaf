"""Notebooks as readable Python files and back: the light format, in which ``# %%`` starts a code cell.

``# %% [markdown]`` starts a text cell, whose lines are comments. Cell ids come from the cell's place, so that a build
changes nothing but what its source changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

CODE = "# %%"
MARKDOWN = "# %% [markdown]"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_COMMENT = re.compile(r"^# ?", re.MULTILINE)

Cell = tuple[str, str]  # ("markdown" | "code", text)


def parse(source: str) -> Iterator[Cell]:
    """The cells of a source file, in order. Empty cells are left out.

    Raises:
        ValueError: text before the first marker, or a line of a text cell that is no comment.
    """
    for number, part in enumerate(re.split(r"^(?=# %%)", source, flags=re.MULTILINE)):
        marker, _, body = part.partition("\n")
        if number == 0 and part.strip():
            raise ValueError(f"text before the first cell marker: {marker!r}")
        kind = "markdown" if marker.strip() == MARKDOWN else "code"
        if kind == "markdown" and (loose := [line for line in body.splitlines() if line and not line.startswith("#")]):
            raise ValueError(f"a text cell holds a line that is no comment: {loose[0]!r}")
        text = _COMMENT.sub("", body) if kind == "markdown" else body
        if text.strip():
            yield kind, text.strip()


def notebook(source: str) -> NotebookNode:
    """The notebook of a source file, without outputs."""
    cells = []
    for number, (kind, text) in enumerate(parse(source)):
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cells.append(make(text, id=f"cell-{number:02}"))
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})


def same_source(one: NotebookNode, other: NotebookNode) -> bool:
    """Whether two notebooks have the same cells, outputs aside."""
    return [(c.cell_type, c.source) for c in one.cells] == [(c.cell_type, c.source) for c in other.cells]
