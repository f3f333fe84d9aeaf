"""What a store's folder remembers about itself, so that whoever opens it next need not say it again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from kvboost_rag.errors import KVBoostError, MissingExtraError, UsageError
from kvboost_rag.kv.choice import Compression, parse_compression
from kvboost_rag.kv.frames import require_zstd
from kvboost_rag.store.disk_folder import FILE_MODE, read_regular
from kvboost_rag.store.policy import DEFAULT_POLICY, check_policy, check_quota, check_ttl

log = logging.getLogger("kvboost_rag.store")

DEFAULT_DISK_BYTES = 20 << 30
_NAME = "settings.json"
_MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of one folder.

    Raises:
        UsageError: a value that makes no sense.
    """

    limit_bytes: int = DEFAULT_DISK_BYTES
    policy: str = DEFAULT_POLICY
    ttl_s: float | None = None  # None: blocks do not expire
    compression: str = "none"
    tenant_bytes: int | None = None  # most bytes of one tenant's blocks; None: as many as fit

    def __post_init__(self) -> None:
        if type(self.limit_bytes) is not int or self.limit_bytes <= 0:
            raise UsageError(f"a limit of {self.limit_bytes!r} bytes", hint="give a positive number")
        if not isinstance(self.policy, str) or not isinstance(self.ttl_s, int | float | None):
            raise UsageError("settings of the wrong types")
        check_policy(self.policy)
        parse_compression(self.compression)
        object.__setattr__(self, "ttl_s", check_ttl(self.ttl_s))
        object.__setattr__(self, "tenant_bytes", check_quota(self.tenant_bytes))

    def tenant_share(self, other_bytes: int) -> int | None:
        """A tenant's quota in a tier of ``other_bytes``: the same share as of the limit here."""
        if self.tenant_bytes is None:
            return None
        return max(1, other_bytes * min(self.tenant_bytes, self.limit_bytes) // self.limit_bytes)


def folder_settings(folder: Path, **given: Any) -> StoreSettings:
    """The settings of ``folder``, with those that were ``given`` (not None) in place of its own; changes are kept.

    Raises:
        UsageError: a given value makes no sense.
        OSError: changes cannot be written.
    """
    known = _read(folder / _NAME)
    settings = replace(known, **{name: value for name, value in given.items() if value is not None})
    if settings != known or (given and not (folder / _NAME).exists()):
        _write(folder / _NAME, settings)
    return settings


def usable(compression: str, warn: Callable[[str, str], None]) -> Compression:
    """What can be written here of a folder's ``compression``: without its library, blocks are not squeezed, and
    ``warn`` is told (cause, message)."""
    choice = parse_compression(compression)
    if choice.framed:
        try:
            require_zstd()
        except MissingExtraError as error:
            warn("zstd", f"blocks are written without zstd, and those with it are misses: {error}")
            return replace(choice, framed=False)
    return choice


def _read(path: Path) -> StoreSettings:
    settings = StoreSettings()
    try:
        values = json.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        return settings
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the settings in %s are not readable, the defaults hold: %s", path, error)
        return settings
    for field in fields(StoreSettings):
        if isinstance(values, dict) and field.name in values:
            try:
                settings = replace(settings, **{field.name: values[field.name]})
            except (KVBoostError, TypeError) as error:
                log.warning("%s in %s is ignored: %s", field.name, path, error)
    return settings


def _write(path: Path, settings: StoreSettings) -> None:
    fresh = path.with_name(f"{_NAME}.{os.getpid()}-{token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE), "w") as file:
            json.dump(asdict(settings), file, indent=1)
        os.replace(fresh, path)
    finally:
        with suppress(OSError):
            fresh.unlink()
