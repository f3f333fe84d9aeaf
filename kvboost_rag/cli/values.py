"""Options whose value may stand in a file: ``@file``."""

from __future__ import annotations

from pathlib import Path

from kvboost_rag.errors import UsageError


def text_value(value: str | None) -> str | None:
    """An option's text; ``@file`` stands for the file's contents.

    Raises:
        UsageError: the file cannot be read.
    """
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{value[1:]} cannot be read: {exc}", hint="@FILE names a UTF-8 text file") from exc


def salt_value(value: str | None) -> str:
    """A tenant's salt, as given or, with ``@file``, from a file (without the line's end).

    Raises:
        UsageError: the file cannot be read, or the salt is empty: that would be the blocks of everybody without one.
    """
    salt = (text_value(value) or "").rstrip("\r\n")
    if value is not None and not salt:
        raise UsageError("an empty salt", hint="leave --salt out for the blocks that have none")
    return salt
