"""The nodes of a persisted LlamaIndex storage context, read from its ``docstore.json`` without LlamaIndex.

The format is what ``StorageContext.persist`` of llama-index-core 0.14 writes (and older ones much the same):
``{"docstore/data": {id: {"__data__": {…, "text": …}, "__type__": "1"}}}``. Type ``"4"`` is a whole document, which no
retriever returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvboost_rag.errors import UsageError
from kvboost_rag.warmup.ingest import Corpus
from kvboost_rag.warmup.source import InputProblem, SourceChunk, text_digest

FILE_NAME = "docstore.json"
_DATA = "docstore/data"
_DOCUMENT = "4"
DOCUMENTS = "whole documents"
WITHOUT_TEXT = "nodes without text"


class LlamaIndexCorpus(Corpus):
    """The texts of all nodes under ``folder`` (a storage context, or a folder of them), in the files' order.

    A text is the node's body, stripped: what stands verbatim in a prompt. Metadata lines stand in front of it and are
    glue. Each pass fills ``problems`` and ``ignored`` anew.

    Raises:
        UsageError: there is no ``docstore.json``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__([folder])
        self.folder = Path(folder).expanduser()
        self._files = self._find()
        self._read = 0

    def _find(self) -> list[Path]:
        if self.folder.is_file():
            return [self.folder]
        files = sorted(self.folder.rglob(FILE_NAME)) if self.folder.is_dir() else []
        if not files:
            raise UsageError(
                f"{self.folder} holds no {FILE_NAME}",
                hint="give the folder of index.storage_context.persist(...); indexes in a vector database are warmed "
                "with llama_index.llms.kvboost_rag.warm_index(llm, index)",
            )
        return files

    def __iter__(self) -> Iterator[SourceChunk]:
        self.problems, self.ignored, self._read = [], {}, 0
        for path in self._files:
            yield from self._nodes(path)
            self._read += 1

    def fraction_read(self) -> float | None:
        """The share of the files that this pass has read, 0 to 1."""
        return self._read / len(self._files)

    def require_readers(self) -> None:
        """Nothing is needed."""

    def _nodes(self, path: Path) -> Iterator[SourceChunk]:
        found = False
        for node_id, entry in self._stored(path).items():
            data = _data_of(entry)
            if data is None:
                self.problems.append(InputProblem(str(path), None, f"node {node_id} is not in the known format"))
            elif entry.get("__type__") == _DOCUMENT:
                self.ignored[DOCUMENTS] = self.ignored.get(DOCUMENTS, 0) + 1
            elif (text := _text_of(data)) is not None:
                found = True
                metadata = data.get("metadata")
                yield SourceChunk(
                    text, str(path), id=str(node_id), metadata=metadata if isinstance(metadata, dict) else {}
                )
            else:
                self.ignored[WITHOUT_TEXT] = self.ignored.get(WITHOUT_TEXT, 0) + 1
        if not found and not self.problems:
            self.problems.append(InputProblem(str(path), None, "no nodes with text"))

    def _stored(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            entries = content.get(_DATA, {})
            if not isinstance(entries, dict):
                raise ValueError(f"{_DATA} is not an object")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            self.problems.append(InputProblem(str(path), None, f"no docstore of LlamaIndex: {error}"))
            return {}
        return entries


def _data_of(entry: Any) -> dict[str, Any] | None:
    """A node's fields; older versions wrote them as a JSON string."""
    data = entry.get("__data__") if isinstance(entry, dict) else None
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError:
            return None
    return data if isinstance(data, dict) else None


def _text_of(data: dict[str, Any]) -> str | None:
    """The body of a node: ``text``, or that of the newer ``text_resource``; None where there is none to encode."""
    resource = data.get("text_resource")
    text = data.get("text") or (resource.get("text") if isinstance(resource, dict) else None)
    if not isinstance(text, str) or not text.strip():
        return None
    try:
        text_digest(text)
    except UnicodeEncodeError:
        return None
    return text.strip()
