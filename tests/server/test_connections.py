"""Connections: how many each port takes, and how long one may say nothing."""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from server import app, connections
from server.app import ZenServer
from server.client import AsyncZenClient
from server.http import serving
from server.serve_options import ServeOptions
from server.tls import TlsFiles
from zen_jax.checkpoint.store import Store


@pytest.mark.parametrize(
    "soft, hard, most, few",
    [
        (1024, 1 << 20, 1000, False),
        (1024, 1024, 256, True),
        (64, 64, 16, True),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, False),
    ],
)
def test_as_many_as_there_are_descriptors_for(
    soft: int, hard: int, most: int, few: bool, monkeypatch: Any, caplog: Any
):
    now = [soft, hard]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(
        connections.resource,
        "setrlimit",
        lambda which, limits: now.__setitem__(slice(None), limits),
    )
    with caplog.at_level(logging.WARNING, "server.connections"):
        connections.raise_limit()
    assert now == [hard, hard] and connections.most_connections() == most
    assert ("ulimit -n" in caplog.text) == few


async def closed(connection: socket.socket) -> None:
    """Returns when the other side closes it; what it says until then is read."""
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 100):
            pass


@contextlib.asynccontextmanager
async def silent(address: str, count: int) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Connections that say nothing; a task ends when the server closes its one."""
    host, port = address.split(":")
    loop, sockets, tasks = asyncio.get_running_loop(), [], []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].setblocking(False)
            await loop.sock_connect(sockets[-1], (host, int(port)))
            tasks.append(asyncio.ensure_future(closed(sockets[-1])))
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in sockets:
            each.close()


async def test_grpc_takes_so_many_connections(tiny_store: Path, monkeypatch: Any):
    monkeypatch.setattr(app, "most_connections", lambda: 4)
    server = ZenServer(Store(tiny_store), ServeOptions(port=0))
    await server.start()
    try:
        async with asyncio.timeout(20), AsyncZenClient(server.address) as client:
            await client.list_variants()
            async with silent(server.address, 8) as over:
                first = asyncio.FIRST_COMPLETED
                # Who says nothing is closed after 10 s; who is too many, at once.
                done, _ = await asyncio.wait(over, timeout=8, return_when=first)
                assert done
                assert len((await client.list_variants()).variants) == 3  # who is there stays
    finally:
        await server.stop()


async def test_a_tls_connection_over_http_that_says_nothing_is_closed(
    tiny_store: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.2)
    issued = trustme.CA().issue_cert("localhost")
    for name, blob in (("cert", issued.cert_chain_pems[0]), ("key", issued.private_key_pem)):
        blob.write_to_path(tmp_path / f"{name}.pem")
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = ZenServer(Store(tiny_store), ServeOptions(port=0, http_port=0, tls=files))
    await server.start()
    try:
        assert server.http is not None
        async with asyncio.timeout(20), silent(server.http.address, 1) as (waiting,):
            await waiting
    finally:
        await server.stop()
