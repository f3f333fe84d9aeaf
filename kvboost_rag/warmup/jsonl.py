"""Ready chunks: one JSON object per line, with the chunk in ``text`` and optionally ``id`` and ``metadata``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from kvboost_rag.warmup.source import InputProblem, SourceChunk, text_digest

_BOM = b"\xef\xbb\xbf"


def parse_lines(lines: Iterable[bytes], source: str) -> Iterator[SourceChunk | InputProblem]:
    """One chunk or problem per line that is not blank; the text is kept exactly."""
    number = 0
    found = False
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            found = True
            yield parse_line(line, source, number)
    if not found:
        yield InputProblem(source, None, "empty file" if number == 0 else "no chunks, only blank lines")


def parse_line(line: bytes, source: str, number: int) -> SourceChunk | InputProblem:
    """The chunk on one line, or what is wrong with it."""

    def problem(reason: str) -> InputProblem:
        return InputProblem(source, number, reason)

    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return problem("not UTF-8")
    except json.JSONDecodeError as exc:
        return problem(f"not JSON: {exc.msg} at column {exc.colno}")
    except (ValueError, RecursionError) as exc:  # numbers of thousands of digits, nesting of thousands of levels
        return problem(f"not usable JSON: {exc}")
    if not isinstance(entry, dict):
        return problem("not a JSON object")
    if "text" not in entry:
        return problem("no 'text' field")
    text = entry["text"]
    if not isinstance(text, str):
        return problem("'text' is not a string")
    if not text.strip():
        return problem("'text' is empty")
    try:
        text_digest(text)
    except UnicodeEncodeError:
        return problem("'text' holds an unpaired surrogate")
    metadata = entry.get("metadata")
    chunk_id = entry.get("id")
    return SourceChunk(
        text=text,
        source=source,
        line=number,
        id="" if chunk_id is None else str(chunk_id),
        metadata=metadata if isinstance(metadata, dict) else {},
    )
