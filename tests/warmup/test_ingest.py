"""What is read must be what a LangChain user's retriever returns, and nothing bad may stop the rest."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvboost_rag.errors import MissingExtraError, UsageError
from kvboost_rag.warmup import Corpus, InputProblem, SourceChunk, SplitOptions, unique

PROSE = "\n\n".join(f"Paragraph {i}. " + "It says several things, one after the other. " * (i % 7) for i in range(60))
TEXT = f"  \n\tLeading space.\r\n\r\nA Windows line.\r\n\r\n{PROSE}\n\nÜñí – 漢字 \u200b end.  \n"


def texts(*paths: Path | str, size: int = 300, overlap: int = 40) -> list[str]:
    return [chunk.text for chunk in Corpus(paths, split=SplitOptions(size, overlap))]


def langchain(text: str, size: int = 300, overlap: int = 40) -> list[str]:
    return RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap).split_text(text)


def problems(*paths: Path | str, skip_unknown: bool = False) -> list[InputProblem]:
    corpus = Corpus(paths, skip_unknown=skip_unknown)
    list(corpus)
    return corpus.problems


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_pdf(path: Path, pages: list[str], password: str = "") -> Path:
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=300, height=300)
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".md", ".TXT"])
@pytest.mark.parametrize(("size", "overlap"), [(300, 40), (1000, 100), (50, 0)])
def test_text_chunks_equal_what_the_langchain_splitter_gives(
    tmp_path: Path, suffix: str, size: int, overlap: int
) -> None:
    path = write(tmp_path / f"a{suffix}", TEXT)
    with path.open(encoding="utf-8") as file:  # as TextLoader reads it
        expected = langchain(file.read(), size, overlap)
    assert texts(path, size=size, overlap=overlap) == expected


def test_html_is_its_visible_text(tmp_path: Path) -> None:
    page = "<html><style>p{}</style><body><p>a &amp; b</p>\n<script>no()</script></body></html>"
    (chunk,) = texts(write(tmp_path / "a.html", page))
    assert "a & b" in chunk
    assert "no()" not in chunk
    assert "p{}" not in chunk


def test_pdf_is_split_page_by_page(tmp_path: Path) -> None:
    path = make_pdf(tmp_path / "a.pdf", ["first page", "", "third page"])
    assert texts(path) == ["first page", "third page"]
    assert problems(path) == []


def test_jsonl_keeps_text_exactly(tmp_path: Path) -> None:
    entries = [{"text": "  a\r\nb\u2028c \n", "id": 7, "metadata": {"page": 3}}, {"text": "x" * 5000, "extra": 1}]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(e, ensure_ascii=False) for e in entries) + "\n\n")
    first, second = Corpus([path])
    assert first == SourceChunk("  a\r\nb\u2028c \n", str(path), 1, "7", {"page": 3})
    assert (second.text, second.line, second.id) == ("x" * 5000, 2, "")


def test_lines_point_at_where_a_chunk_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    lines = path.read_text().splitlines()
    for chunk in Corpus([path], split=SplitOptions(300, 40)):
        assert chunk.line is not None
        first = chunk.text.splitlines()[0]
        assert first in lines[chunk.line - 1]


def test_folders_are_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/c.txt", "c/d/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, f"text of {name}")
    assert texts(tmp_path) == ["text of a/z.md", "text of b.txt", "text of c/d/e.txt"]


def test_an_explicitly_named_hidden_file_is_read(tmp_path: Path) -> None:
    assert texts(write(tmp_path / ".notes.txt", "secret")) == ["secret"]


def test_linked_folders_are_told_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.txt", "x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    corpus = Corpus([tmp_path])
    assert [chunk.text for chunk in corpus] == ["x"]
    assert corpus.ignored == {"linked folders": 1}
    assert [problem.source for problem in corpus.problems] == [str(tmp_path / "self")]


def test_a_linked_root_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.txt", "x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert texts(tmp_path / "link") == ["x"]


BAD = {
    "binary.txt": (b"ab\0cd", None, "binary"),
    "latin.txt": ("line\nGrüße".encode("latin-1"), 2, "UTF-8"),
    "latin.html": ("<p>\n\nGrüße".encode("latin-1"), 3, "UTF-8"),
    "empty.txt": (b"", None, "empty"),
    "blank.md": (b" \n\t\n", None, "no text"),
    "empty.pdf": (b"", None, "empty"),
    "broken.pdf": (b"%PDF-1.7\nnonsense", None, "unreadable PDF"),
    "empty.jsonl": (b"", None, "empty"),
    "blank.jsonl": (b"\n \n", None, "blank"),
    "cut.jsonl": (b'{"text": "fine"}\n{"text": "cu', 2, "not JSON"),
    "list.jsonl": (b"\n[1, 2]", 2, "object"),
    "notext.jsonl": (b'{"content": "x"}', 1, "'text'"),
    "number.jsonl": (b'{"text": 3}', 1, "string"),
    "void.jsonl": (b'{"text": " "}', 1, "empty"),
    "latin.jsonl": (b'{"text": "fine"}\n{"text": "\xfc"}', 2, "UTF-8"),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', 1, "surrogate"),
    "deep.jsonl": (b"[" * 100_000, 1, "usable"),
    "digits.jsonl": (b'{"text": ' + b"9" * 10_000 + b"}", 1, "usable"),
    "image.png": (b"\x89PNG", None, ".png"),
    "LICENSE": (b"text", None, "suffix"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_told_with_file_and_line(tmp_path: Path, name: str) -> None:
    content, line, word = BAD[name]
    path = write(tmp_path / name, content)
    (problem,) = problems(path)
    assert (problem.source, problem.line) == (str(path), line)
    assert word in problem.reason


def test_the_rest_goes_on(tmp_path: Path) -> None:
    for name, (content, _, _) in BAD.items():
        write(tmp_path / name, content)
    write(tmp_path / "good.txt", "good")
    corpus = Corpus([tmp_path / "absent", tmp_path])
    found = {chunk.text for chunk in corpus}
    assert found == {"good", "fine"}
    assert len(corpus.problems) == len(BAD) + 1
    assert corpus.problems[0] == InputProblem(str(tmp_path / "absent"), None, "no such file or folder")


def test_an_encrypted_pdf_and_a_scanned_pdf_are_problems(tmp_path: Path) -> None:
    (locked,) = problems(make_pdf(tmp_path / "locked.pdf", ["secret"], password="x"))
    (scanned,) = problems(make_pdf(tmp_path / "scan.pdf", ["", ""]))
    assert "encrypted" in locked.reason
    assert "OCR" in scanned.reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_a_problem(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        write(tmp_path / name, "x").chmod(0)
    assert ["cannot be read" in problem.reason for problem in problems(tmp_path)] == [True, True]


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.pdf", "d.html"])
def test_a_read_error_is_a_problem(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / name, "x")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    (problem,) = problems(path)
    assert "Permission denied" in problem.reason


def test_a_pipe_is_a_problem_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (problem,) = problems(tmp_path)
    assert "neither" in problem.reason


def test_skip_unknown_counts_by_suffix(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.css", "Makefile", "d.txt"):
        write(tmp_path / name, "text")
    corpus = Corpus([tmp_path], skip_unknown=True)
    assert [chunk.text for chunk in corpus] == ["text"]
    assert corpus.problems == []
    assert corpus.ignored == {".png": 2, ".css": 1, "no suffix": 1}


def test_a_second_pass_starts_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.txt", "")
    corpus = Corpus([tmp_path])
    assert list(corpus) == list(corpus)
    assert len(corpus.problems) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('\n{"text": " a "}\n{"text": "b"}\n', [(" a ", 2), ("b", 3)]),
        ('\ufeff{"text": "a"}', [("a", 1)]),
        ("plain\ntext", [("plain\ntext", 1)]),
        ('{"other": 1}', [('{"other": 1}', 1)]),
        ("[1]\n", [("[1]", 1)]),
    ],
)
def test_stdin_is_jsonl_if_its_first_line_says_so(content: str, expected: list[tuple[str, int]]) -> None:
    corpus = Corpus(["-"], stdin=io.BytesIO(content.encode()))
    assert [(chunk.text, chunk.line) for chunk in corpus] == expected
    assert corpus.problems == []


def test_bad_lines_of_stdin_are_problems() -> None:
    corpus = Corpus(["-"], stdin=io.BytesIO(b'{"text": "a"}\n{"text": '))
    assert [chunk.text for chunk in corpus] == ["a"]
    assert [(problem.source, problem.line) for problem in corpus.problems] == [("-", 2)]


def test_empty_stdin_is_a_problem() -> None:
    corpus = Corpus(["-"], stdin=io.BytesIO(b""))
    assert list(corpus) == []
    assert [str(problem) for problem in corpus.problems] == ["-: empty input"]


def test_only_one_file_is_read_at_a_time(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 1000)
    write(tmp_path / "b.txt", "b")
    corpus = Corpus([tmp_path])
    next(iter(corpus))
    assert 0 < (corpus.fraction_read() or 0) < 0.5


def test_fraction_read_ends_at_one_and_is_unknown_for_stdin(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    corpus = Corpus([tmp_path])
    list(corpus)
    assert corpus.fraction_read() == 1.0
    assert Corpus(["-"], stdin=io.BytesIO(b"")).fraction_read() is None


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (10, 10), (10, -1), (10, 11)])
def test_sizes_that_contradict_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(UsageError, match="do not go together"):
        SplitOptions(size, overlap)


def test_no_paths_and_stdin_twice_are_refused() -> None:
    with pytest.raises(UsageError):
        Corpus([])
    with pytest.raises(UsageError):
        Corpus(["-", "-"])


@pytest.mark.parametrize(
    ("module", "name"), [("langchain_text_splitters", "a.txt"), ("bs4", "a.html"), ("pypdf", "a.pdf")]
)
def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    write(tmp_path / name, "x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvboost-rag\[ingest\]'"):
        Corpus([tmp_path]).require_readers()
    with pytest.raises(MissingExtraError):
        list(Corpus([tmp_path]))


def test_ready_chunks_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_text_splitters", None)
    path = write(tmp_path / "a.jsonl", '{"text": "a"}')
    Corpus([path]).require_readers()
    assert texts(path) == ["a"]


def test_unique_keeps_the_first_of_each_stripped_text() -> None:
    chunks = [SourceChunk(text) for text in ("a", " a\n", "b", "", "\ud800", "a")]
    assert [chunk.text for chunk in unique(chunks)] == ["a", "b"]
