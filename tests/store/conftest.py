"""Real servers for the remote stores, started on loopback for the whole session."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class RedisServer:
    """A real Redis or Valkey server, which tests may stop and start again."""

    def __init__(self, folder: Path) -> None:
        self.binary = shutil.which("redis-server") or shutil.which("valkey-server") or ""
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *more: str) -> None:
        words = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        words += ["--dir", str(self.folder), *more]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
        raise RuntimeError("redis-server does not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="redis-py is not installed")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    if not server.binary:
        pytest.skip("no redis-server or valkey-server binary")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """A prefix of its own on the server."""
    return f"{redis_server.url}?prefix={uuid4().hex}:[*"


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Two nodes that share the slots; the first of them."""
    redis = pytest.importorskip("redis", reason="redis-py is not installed")
    nodes = [RedisServer(tmp_path_factory.mktemp("cluster")) for _ in range(2)]
    if not nodes[0].binary:
        pytest.skip("no redis-server or valkey-server binary")
    for node, bus in zip(nodes, (free_port(), free_port()), strict=True):
        node.start("--cluster-enabled", "yes", "--cluster-port", str(bus))
    clients = [redis.Redis.from_url(node.url) for node in nodes]
    for client, slots in zip(clients, ((0, 8191), (8192, 16383)), strict=True):
        client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
    bus = clients[1].config_get("cluster-port")["cluster-port"]
    clients[0].execute_command("CLUSTER MEET", "127.0.0.1", nodes[1].port, bus)
    deadline = time.monotonic() + 30
    while any(client.execute_command("CLUSTER INFO")["cluster_state"] != "ok" for client in clients):
        if time.monotonic() > deadline:
            raise RuntimeError("the cluster does not form")
    yield nodes[0]
    for node in nodes:
        node.stop()


@pytest.fixture
def cluster_url(redis_cluster: RedisServer) -> str:
    return f"{redis_cluster.url}?cluster=1&prefix={uuid4().hex}:[*"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3-compatible server with a bucket ``kvboost``."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.create_bucket(Bucket="kvboost")
    yield endpoint
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own in the bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    return f"s3://kvboost/{uuid4().hex}?endpoint={s3_endpoint}&region=us-east-1"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    pytest.importorskip("obstore", reason="obstore is not installed")
    return f"file://{tmp_path}/objects"


@pytest.fixture(params=["redis", "cluster", "s3", "file"])
def remote_url(request: pytest.FixtureRequest) -> str:
    """The same test on every kind of server."""
    return str(request.getfixturevalue(f"{request.param}_url"))
