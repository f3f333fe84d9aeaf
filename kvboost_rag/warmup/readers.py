"""From one file to its texts: plain text, markdown, HTML and PDF.

Each reader gives the text that LangChain's loader of the same kind would give (TextLoader, BSHTMLLoader, PyPDFLoader
page by page), because a chunk is only found again if the retriever's text is the same to the character. Markdown stays
as written. What cannot be read comes out as an :class:`InputProblem` between the texts, never as an exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kvboost_rag.errors import MissingExtraError
from kvboost_rag.warmup.source import InputProblem


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a file or of one of its pages; ``has_lines`` says whether line numbers of the text are the file's."""

    text: str
    has_lines: bool = False


Reader = Callable[[Path, str], Iterator[Document | InputProblem]]  # (file, its name in problems)


def require(module: str) -> ModuleType:
    """Import ``module``, which the ``[ingest]`` extra brings.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        name = module.partition(".")[0]
        raise MissingExtraError(
            f"{name} is needed to read these inputs and is not installed",
            hint="pip install 'kvboost-rag[ingest]'",
        ) from exc


def decode(data: bytes, source: str) -> str | InputProblem:
    """UTF-8 text with line ends as Python's text mode gives them, or why ``data`` is none."""
    if not data:
        return InputProblem(source, None, "empty file")
    if b"\0" in data:
        return InputProblem(source, None, "binary data in a text file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        return InputProblem(source, line, f"not UTF-8 (byte {data[exc.start]:#04x}); convert the file to UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _load(path: Path, source: str) -> str | InputProblem:
    try:
        return decode(path.read_bytes(), source)
    except OSError as exc:
        return InputProblem(source, None, f"cannot be read: {exc.strerror or exc}")


def read_text(path: Path, source: str) -> Iterator[Document | InputProblem]:
    """A .txt or .md file, as it stands."""
    text = _load(path, source)
    yield text if isinstance(text, InputProblem) else Document(text, has_lines=True)


def read_html(path: Path, source: str) -> Iterator[Document | InputProblem]:
    """The visible text of an HTML file.

    The parser is lxml where it is installed (LangChain's default), else Python's own; they differ in white space
    between elements of broken pages.
    """
    text = _load(path, source)
    if isinstance(text, InputProblem):
        yield text
        return
    bs4 = require("bs4")
    soup = bs4.BeautifulSoup(text, "lxml" if find_spec("lxml") else "html.parser")
    yield Document(soup.get_text())


def read_pdf(path: Path, source: str) -> Iterator[Document | InputProblem]:
    """The text of each page that has any. A page that cannot be read is a problem, the other pages are given."""
    pypdf = require("pypdf")
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            yield InputProblem(source, None, "encrypted PDF; save a copy without password")
            return
        num_pages = len(reader.pages)
    except Exception as exc:  # damaged PDFs raise nearly anything out of pypdf
        yield InputProblem(source, None, _pdf_reason(path, exc))
        return
    empty = True
    for index in range(num_pages):
        page = _read_page(reader, index, source)
        empty = empty and isinstance(page, Document) and not page.text
        yield page
    if empty:
        yield InputProblem(source, None, "PDF without text (scanned pages need OCR first)")


def _pdf_reason(path: Path, exc: Exception) -> str:
    if isinstance(exc, OSError):
        return f"cannot be read: {exc.strerror or exc}"
    try:
        if path.stat().st_size == 0:
            return "empty file"
    except OSError:
        pass
    # pypdf names the missing cryptography package here; without it AES files cannot even be tried.
    if type(exc).__name__ == "DependencyError":
        return f"encrypted PDF: {exc}"
    return f"unreadable PDF: {exc or type(exc).__name__}"


def _read_page(reader: Any, index: int, source: str) -> Document | InputProblem:
    try:
        return Document(reader.pages[index].extract_text().strip())
    except Exception as exc:  # see read_pdf
        return InputProblem(source, None, f"page {index + 1} is unreadable: {exc or type(exc).__name__}")


READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
}
NEEDS = {".html": "bs4", ".htm": "bs4", ".pdf": "pypdf"}  # besides the splitter
JSONL = ".jsonl"
SUFFIXES = (*READERS, JSONL)
