"""Object stores (S3 and its likes, Google Cloud Storage, Azure, a folder) as a remote medium, through obstore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvboost_rag.errors import MissingExtraError, UsageError
from kvboost_rag.store.remote_link import Piece, TooLarge, Value
from kvboost_rag.store.remote_quota import MarkLedger

_MOST = 5 << 30  # bytes of an object that is written in one request, by S3's limit
_READERS = 8
_PIECE = 1 << 20  # bytes


class ObjectMedium:
    """A bucket, a container or a folder. Credentials come from the environment, as each provider's own tools read them.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://account/container/prefix`` or ``file:///folder``.
        timeout_s: of one request, body included.
        endpoint: URL of an S3-compatible server that is not AWS.
        region: of the bucket.

    Raises:
        MissingExtraError: obstore is not installed.
        UsageError: the URL or an option makes no sense.
    """

    max_value_bytes = _MOST

    def __init__(
        self, url: str, *, timeout_s: float = 60.0, endpoint: str | None = None, region: str | None = None
    ) -> None:
        try:
            import obstore
            from obstore import store as stores
            from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
        except ImportError as error:
            hint = "pip install 'kvboost-rag[s3]'"
            raise MissingExtraError(f"a store at {url.split('://')[0]}:// needs obstore: {error}", hint=hint) from None
        self._obs: Any = obstore
        open_url: Any = stores.from_url  # its overloads know each provider's options apart
        self._missing: tuple[type[Exception], ...] = (NotFoundError, FileNotFoundError)
        self._present: tuple[type[Exception], ...] = (AlreadyExistsError, FileExistsError)
        self.kind = url.split("://")[0].lower()
        try:
            if self.kind == "file":
                Path(url[len("file://") :]).mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store: Any = stores.LocalStore(url[len("file://") :])
            else:
                config = {"endpoint": endpoint, "region": region}
                self._store = open_url(
                    url,
                    config={k: v for k, v in config.items() if v is not None} or None,
                    client_options={
                        "timeout": timedelta(seconds=timeout_s),
                        "connect_timeout": timedelta(seconds=min(timeout_s, 5.0)),
                        "allow_http": bool(endpoint and endpoint.startswith("http://")),
                    },
                    retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},  # the link retries
                )
        except (BaseError, ValueError, TypeError, OSError) as error:
            raise UsageError(f"cannot use {self.kind}:// store: {error}", hint="s3://bucket/prefix") from None
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kvboost-objects")

    def read(self, names: Sequence[str], limit: int) -> list[Value]:
        if len(names) == 1:
            return [self._read(names[0], limit)]
        return list(self._pool.map(lambda name: self._read(name, limit), names))

    def _read(self, name: str, limit: int) -> Value:
        try:
            answer = self._obs.get(self._store, name)  # headers; the body comes when it is asked for
        except self._missing:
            return None
        size = int(answer.meta["size"])
        if size > limit:
            return TooLarge(size)
        return memoryview(answer.bytes())

    def stream(self, names: Sequence[str], limit: int, starts: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        bodies: dict[int, Iterator[Any]] = {}
        for i, answer in enumerate(self._pool.map(self._begin, names, starts)):
            size = None if answer is None else int(answer.meta["size"])
            yield i, TooLarge(size) if size is not None and size > limit else size
            if answer is not None and size is not None and starts[i] < size <= limit:
                bodies[i] = iter(answer.stream(min_chunk_size=_PIECE))
        while bodies:
            for i, body in list(bodies.items()):
                piece = next(body, None)
                if piece is None:
                    del bodies[i]
                else:
                    yield i, memoryview(piece)

    def _begin(self, name: str, start: int) -> Any:
        """Headers of a value, whose body from ``start`` on comes when it is asked for; None where there is none."""
        with suppress(*self._missing):
            return self._obs.get(self._store, name, options={"range": {"offset": start}} if start else None)
        return None

    def write(self, name: str, value: bytes) -> None:
        self._obs.put(self._store, name, value)

    def create(self, name: str, value: bytes) -> bool:
        try:
            self._obs.put(self._store, name, value, mode="create", use_multipart=False)
        except self._present:
            return False
        return True

    def exists(self, name: str) -> bool:
        try:
            self._obs.head(self._store, name)
        except self._missing:
            return False
        return True

    def delete(self, names: Sequence[str]) -> int:
        if len(names) == 1 and not self.exists(names[0]):
            return 0
        for first in range(0, len(names), 1000):
            with suppress(*self._missing):
                self._obs.delete(self._store, list(names[first : first + 1000]))
        return len(names)

    def entries(self, area: str) -> Iterator[tuple[str, int]]:
        for page in self._obs.list(self._store, prefix=f"{area}/"):
            for entry in page:
                yield str(entry["path"]), int(entry["size"])

    def ledger(self) -> MarkLedger:
        return MarkLedger(self)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
