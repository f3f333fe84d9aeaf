"""From a URL such as ``redis://host/0?write=back`` to a remote store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvboost_rag.errors import UnknownOptionError, UsageError
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.remote import RemoteStore
from kvboost_rag.store.remote_link import Medium

REDIS_SCHEMES = ("redis", "rediss")
OBJECT_SCHEMES = ("s3", "gs", "az", "file")
_OURS = ("timeout", "write_timeout", "refresh", "write", "prefix", "cluster", "endpoint", "region")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A URL without our own options, and these."""

    scheme: str
    url: str
    options: dict[str, str]


def scheme_of(spec: str) -> str | None:
    """The scheme of a URL, in lower case; None for what is no URL."""
    match = _SCHEME.match(spec)
    return match[1].lower() if match else None


def check_path(spec: str | Path) -> None:
    """Raises UsageError for what would be taken as a folder's path, and was meant as a URL: ``redis:/host``."""
    start = str(spec).split(":")[0].lower()
    if isinstance(spec, str) and ":" in spec and start in REDIS_SCHEMES + OBJECT_SCHEMES and scheme_of(spec) is None:
        raise UsageError(f"store={spec!r} is neither a URL nor a likely folder", hint=f"{start}://…, or ./{spec}")


def parse_url(url: str) -> RemoteUrl:
    """Take our options out of a URL's query. Others are left to redis-py; object stores have none.

    Raises:
        UsageError: an unknown scheme.
        UnknownOptionError: an option that this scheme does not have.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in REDIS_SCHEMES + OBJECT_SCHEMES:
        known = ", ".join(f"{s}://" for s in REDIS_SCHEMES + OBJECT_SCHEMES)
        raise UsageError(f"unknown kind of store {scheme}://", hint=f'a folder, "memory", None, {known}')
    query = parse_qsl(parts.query, keep_blank_values=True)
    own = {name: value for name, value in query if name in _OURS}
    rest = [(name, value) for name, value in query if name not in _OURS]
    foreign = {"endpoint", "region"} if scheme in REDIS_SCHEMES else {"prefix", "cluster", *dict(rest)}
    for name in [*own, *dict(rest)]:
        if name in foreign:
            raise UnknownOptionError(f"{scheme}:// has no option {name!r}", hint=f"known: {', '.join(_OURS)}")
    return RemoteUrl(scheme, urlunsplit((scheme, parts.netloc, parts.path, urlencode(rest), "")), own)


def check_url(url: str) -> None:
    """Raises like :func:`open_remote` for a URL that makes no sense, without touching a folder or a server."""
    parsed = parse_url(url)
    if parsed.scheme in REDIS_SCHEMES:
        _medium(parsed, 1.0, 1.0, None).close()


def open_remote(
    url: str,
    *,
    anchors: AnchorIndex | None = None,
    keep_text: bool = False,
    compression: str = "none",
    ttl_s: float | None = None,
    tenant_bytes: int | None = None,
) -> RemoteStore:
    """The store at ``url``. A server that does not answer is no error: its blocks are misses.

    Raises:
        UsageError: the URL or an option makes no sense.
        MissingExtraError: the client library is not installed.
    """
    parsed = parse_url(url)
    write = parsed.options.get("write", "through")
    timeout_s, write_timeout_s = _seconds(parsed, "timeout", 5.0), _seconds(parsed, "write_timeout", 60.0)
    return RemoteStore(
        _medium(parsed, timeout_s, write_timeout_s, ttl_s),
        anchors=anchors,
        keep_text=keep_text,
        compression=compression,
        ttl_s=ttl_s,
        tenant_bytes=tenant_bytes,
        write=write,
        timeout_s=timeout_s,
        write_timeout_s=write_timeout_s,
        refresh_s=_seconds(parsed, "refresh", 30.0),
    )


def _medium(parsed: RemoteUrl, timeout_s: float, write_timeout_s: float, ttl_s: float | None) -> Medium:
    if parsed.scheme in REDIS_SCHEMES:
        from kvboost_rag.store.remote_redis import DEFAULT_PREFIX, RedisMedium

        prefix = parsed.options.get("prefix", DEFAULT_PREFIX)
        cluster = parsed.options.get("cluster", "0")
        if cluster not in ("0", "1"):
            raise UsageError(f"cluster={cluster!r} in the store's URL", hint="1 for a Redis Cluster, 0 for one server")
        return RedisMedium(parsed.url, prefix=prefix, timeout_s=timeout_s, ttl_s=ttl_s, cluster=cluster == "1")
    from kvboost_rag.store.remote_objects import ObjectMedium

    endpoint, region = parsed.options.get("endpoint"), parsed.options.get("region")
    return ObjectMedium(parsed.url, timeout_s=write_timeout_s, endpoint=endpoint, region=region)


def _seconds(parsed: RemoteUrl, name: str, default: float) -> float:
    text = parsed.options.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text!r} in the store's URL", hint="seconds, more than 0")
    return value
