"""From paths to chunks: a corpus that is walked, read and split one file at a time.

``Corpus`` can be iterated several times; each pass reads the inputs again and fills ``problems`` and ``ignored`` anew.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from kvboost_rag.errors import UsageError
from kvboost_rag.warmup.jsonl import parse_line, parse_lines
from kvboost_rag.warmup.readers import JSONL, NEEDS, READERS, SUFFIXES, Document, decode, require
from kvboost_rag.warmup.source import InputProblem, SourceChunk

STDIN = "-"
LINKED = "linked folders"  # keys of Corpus.ignored besides the suffixes
NO_SUFFIX = "no suffix"


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How documents are split: sizes in characters, as LangChain's RecursiveCharacterTextSplitter counts.

    Raises:
        UsageError: the sizes contradict each other.
    """

    chunk_size: int = 1000
    chunk_overlap: int = 100

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or not 0 <= self.chunk_overlap < self.chunk_size:
            raise UsageError(
                f"chunk size {self.chunk_size} and overlap {self.chunk_overlap} do not go together",
                hint="size must be at least 1, overlap at least 0 and less than the size",
            )

    def splitter(self) -> Any:
        """The LangChain splitter. Raises :class:`MissingExtraError` where it is not installed."""
        module = require("langchain_text_splitters")
        return module.RecursiveCharacterTextSplitter(chunk_size=self.chunk_size, chunk_overlap=self.chunk_overlap)


@dataclass(frozen=True, slots=True)
class LinkedFolder:
    """A link to a folder, met while walking."""

    path: Path


class Corpus:
    """The chunks of files, folders and stdin (``-``), in a stable order.

    Folders are walked recursively in name order, hidden entries left out. Texts, HTML and PDF are split; ``.jsonl``
    holds ready chunks. Bad inputs are appended to ``problems`` and never stop the pass. A text that occurs twice is
    given twice; ``warm``, ``plan`` and ``unique`` drop the repeats.

    Raises:
        UsageError: no paths, or stdin named twice.
        MissingExtraError: (while iterating) a library that an input needs is not installed.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        split: SplitOptions | None = None,
        skip_unknown: bool = False,
        stdin: BinaryIO | None = None,
    ) -> None:
        self.paths = [os.fspath(path) for path in paths]
        if not self.paths:
            raise UsageError("no input", hint="name files or folders, or - for stdin")
        if self.paths.count(STDIN) > 1:
            raise UsageError("stdin (-) can be read only once", hint="name - once")
        self.split = split or SplitOptions()
        self.skip_unknown = skip_unknown
        self.problems: list[InputProblem] = []
        self.ignored: dict[str, int] = {}  # suffix or kind → how many were left out on purpose
        self._stdin = stdin
        self._splitter: Any = None
        self._bytes_read = 0
        self._bytes_total: int | None = None

    def __iter__(self) -> Iterator[SourceChunk]:
        self.problems, self.ignored, self._bytes_read = [], {}, 0
        for path in self.paths:
            yield from self._stdin_chunks() if path == STDIN else self._path_chunks(Path(path))

    def fraction_read(self) -> float | None:
        """The share of the input's bytes that this pass has read, 0 to 1; None where it cannot be known (stdin)."""
        if STDIN in self.paths:
            return None
        if self._bytes_total is None:
            files = chain.from_iterable(walk(Path(path)) for path in self.paths)
            self._bytes_total = sum(_size(item) for item in files if isinstance(item, Path))
        return min(1.0, self._bytes_read / self._bytes_total) if self._bytes_total else 1.0

    def require_readers(self) -> None:
        """Import now what the inputs will need, so that a missing library shows before a model is loaded.

        Raises:
            MissingExtraError: a library is not installed.
        """
        files = chain.from_iterable(walk(Path(path)) for path in self.paths if path != STDIN)
        suffixes = {item.suffix.lower() for item in files if isinstance(item, Path)}
        if suffixes & READERS.keys():
            self.split.splitter()
        for module in {NEEDS[suffix] for suffix in suffixes & NEEDS.keys()}:
            require(module)

    def _path_chunks(self, root: Path) -> Iterator[SourceChunk]:
        for item in walk(root):
            if isinstance(item, InputProblem):
                self.problems.append(item)
            elif isinstance(item, LinkedFolder):
                self._ignore(LINKED)
            elif (suffix := item.suffix.lower()) not in SUFFIXES:
                self._unknown(item, suffix)
            elif suffix == JSONL:
                yield from self._jsonl_chunks(item)
            else:
                yield from self._document_chunks(item, suffix)

    def _ignore(self, kind: str) -> None:
        self.ignored[kind] = self.ignored.get(kind, 0) + 1

    def _unknown(self, path: Path, suffix: str) -> None:
        if self.skip_unknown:
            self._ignore(suffix or NO_SUFFIX)
        else:
            kind = f"suffix {suffix}" if suffix else "files without a suffix"
            self.problems.append(InputProblem(display(path), None, f"{kind} not supported ({' '.join(SUFFIXES)})"))

    def _document_chunks(self, path: Path, suffix: str) -> Iterator[SourceChunk]:
        source = display(path)
        self._bytes_read += _size(path)
        for item in READERS[suffix](path, source):
            if isinstance(item, InputProblem):
                self.problems.append(item)
            else:
                yield from self._pieces(item, source, warn=suffix != ".pdf")

    def _pieces(self, document: Document, source: str, warn: bool = True) -> Iterator[SourceChunk]:
        if self._splitter is None:
            self._splitter = self.split.splitter()
        start, line, found = 0, 1, False
        for piece in self._splitter.split_text(document.text):
            found = True
            if document.has_lines:
                at = document.text.find(piece, start)
                if at > start:  # pieces overlap, so the next is looked for from this one's start on
                    line += document.text.count("\n", start, at)
                    start = at
            yield SourceChunk(piece, source, line if document.has_lines else None)
        if warn and not found:
            self.problems.append(InputProblem(source, None, "no text, only white space"))

    def _jsonl_chunks(self, path: Path) -> Iterator[SourceChunk]:
        try:
            with path.open("rb") as file:
                yield from self._entries(self._count_bytes(file), display(path))
        except OSError as exc:
            self.problems.append(InputProblem(display(path), None, f"cannot be read: {exc.strerror or exc}"))

    def _entries(self, lines: Iterator[bytes], source: str) -> Iterator[SourceChunk]:
        for item in parse_lines(lines, source):
            if isinstance(item, InputProblem):
                self.problems.append(item)
            else:
                yield item

    def _count_bytes(self, lines: BinaryIO) -> Iterator[bytes]:
        for line in lines:
            self._bytes_read += len(line)
            yield line

    def _stdin_chunks(self) -> Iterator[SourceChunk]:
        stream = self._stdin or sys.stdin.buffer
        head: list[bytes] = []
        for line in stream:
            head.append(line)
            if line.strip():
                break
        if head and isinstance(parse_line(head[-1].removeprefix(b"\xef\xbb\xbf"), STDIN, len(head)), SourceChunk):
            yield from self._entries(chain(head, stream), STDIN)
            return
        text = decode(b"".join(chain(head, stream)), STDIN)
        if isinstance(text, InputProblem):
            self.problems.append(InputProblem(STDIN, text.line, text.reason.replace("file", "input")))
        else:
            yield from self._pieces(Document(text, has_lines=True), STDIN)


def walk(root: Path) -> Iterator[Path | InputProblem | LinkedFolder]:
    """Regular files at or under ``root`` in name order. ``root`` itself may be a link; links to folders further down
    are given as :class:`LinkedFolder` and not followed, for they may lead in circles or out of the corpus."""
    stack = [root]
    while stack:
        path = stack.pop()
        try:
            mode = path.stat().st_mode
            if stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                yield InputProblem(display(path), None, "neither a file nor a folder")
            elif path is not root and path.is_symlink():
                yield LinkedFolder(path)
            else:
                names = sorted((name for name in os.listdir(path) if not name.startswith(".")), reverse=True)
                stack += [path / name for name in names]
        except FileNotFoundError:
            broken = "broken link" if path.is_symlink() else "no such file or folder"
            yield InputProblem(display(path), None, broken)
        except OSError as exc:
            yield InputProblem(display(path), None, f"cannot be read: {exc.strerror or exc}")


def display(path: Path) -> str:
    """The path as printable text; bytes that are no text are shown as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
