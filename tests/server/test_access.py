"""Who is let in to a server, and what they see: over gRPC, with tokens and with certificates.

No engine is needed for any of it: a call that is let in finds a server that is starting.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server import rights, status
from server.app import ZenServer
from server.auth import Right, Tokens, new_token
from server.client import AsyncZenClient, ZenError
from server.client_access import Access
from server.client_retries import Retries
from server.http.app import RIGHTS
from server.serve_options import ServeOptions
from server.status import StatusError
from server.tls import TlsFileError, TlsFiles
from zen.v1 import generate_pb2, operations_pb2, variants_pb2
from zen_jax.checkpoint.store import Store

ONCE = Retries(attempts=1)


@asynccontextmanager
async def serving(store: Path, **options: Any) -> AsyncIterator[ZenServer]:
    """Started; nothing is loaded."""
    server = ZenServer(Store(store), ServeOptions(port=0, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., str]:
    """Makes tokens in a file, which is `tokens.file`."""

    def make(**settings: Any) -> str:
        return new_token(tmp_path / "tokens.json", **settings)

    make.file = tmp_path / "tokens.json"  # pyright: ignore[reportFunctionMemberAccess]
    return make


def every_method() -> set[str]:
    """All that the server offers, by the descriptors of its services."""
    files = (
        generate_pb2.DESCRIPTOR,
        variants_pb2.DESCRIPTOR,
        operations_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    )
    return {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


def test_every_method_has_its_right_and_none_is_forgotten():
    assert set(rights.METHODS) == every_method()
    public = {method for method, right in rights.METHODS.items() if right is rights.PUBLIC}
    assert public == {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    operated = {m.rsplit("/")[-1] for m, r in rights.METHODS.items() if r is Right.operate}
    assert operated == {"LoadVariant", "UnloadVariant", "PinVariant", "CaptureProfile"}


def test_a_method_that_nobody_thought_of_is_nobodys(tokens):
    metadata = Access(tokens(rights=list(Right))).metadata
    for gate, given in (
        (rights.Gate(None, operators=True), ()),
        (rights.Gate(Tokens(tokens.file), operators=False), metadata),
    ):
        with pytest.raises(StatusError, match="this asks for the right none"):
            gate.call("/zen.v1.VariantService/Forgotten", given)


async def outcome(channel: grpc.aio.Channel, method: str, token: str | None) -> grpc.StatusCode:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    if method.endswith("ServerReflectionInfo"):
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = channel.stream_stream(method)(iter([request.SerializeToString()]), metadata=metadata)
    else:
        call = channel.unary_stream(method)(b"", metadata=metadata, timeout=10)
    try:
        async with asyncio.timeout(10):
            await call.read()
            if not method.endswith("Watch"):
                await call.read()
    except grpc.RpcError:
        pass
    if method.endswith("Watch"):
        call.cancel()
        return grpc.StatusCode.OK
    return await call.code()


async def test_nothing_is_open_without_a_token_but_health(tiny_store, tokens):
    tokens()
    async with (
        serving(tiny_store, tokens=tokens.file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for method in sorted(every_method()):
            for token in (None, "zen_" + "0" * 12 + "_" + "x" * 43):
                code = await outcome(channel, method, token)
                open_ = token is None and rights.METHODS[method] is rights.PUBLIC
                expected = grpc.StatusCode.OK if open_ else grpc.StatusCode.UNAUTHENTICATED
                assert code is expected or method.endswith("Watch"), (method, code)


async def test_who_is_not_let_in_is_counted_and_logged(tiny_store, tokens, caplog):
    caplog.set_level(logging.INFO, "server")
    token = tokens(rights=[Right.list])
    method = "/zen.v1.VariantService/UnloadVariant"
    async with (
        serving(tiny_store, tokens=tokens.file, http_port=0) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for given in (None, "zen_nonsense", token):
            await outcome(channel, method, given)
        assert (await ask(server, "/v1/models/odd", "zen_nonsense")).status_code == 401
        seen = server._observing.metrics.text().decode()
    counted = {line for line in seen.splitlines() if line.startswith("zen_refused_calls_total")}
    name = "zen_refused_calls_total"
    assert counted == {
        f'{name}{{code="UNAUTHENTICATED",method="{method}"}} 2.0',
        f'{name}{{code="PERMISSION_DENIED",method="{method}"}} 1.0',
        f'{name}{{code="UNAUTHENTICATED",method="/v1/models/{{name:path}}"}} 1.0',
    }
    logged = [record.getMessage() for record in caplog.records if "let in" in record.getMessage()]
    assert len(logged) == 4 and logged[2].endswith(f"PERMISSION_DENIED, token {token[4:16]}")
    assert "nonsense" not in caplog.text and token not in caplog.text


async def test_what_a_stranger_sends_is_not_parsed(tiny_store, tokens, monkeypatch):
    parsed: list[bytes] = []

    def noting(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        return lambda data: (parsed.append(data), read(data))[1]

    token = tokens()
    monkeypatch.setattr(status, "_lenient", noting)
    method = "/zen.v1.VariantService/ListVariants"
    async with (
        serving(tiny_store, tokens=tokens.file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.unary_unary(method)(b"\xff\xff\xff", timeout=10)  # no message
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not parsed
        assert await outcome(channel, method, token) is grpc.StatusCode.OK
        assert parsed


@pytest.mark.parametrize("right", list(Right))
async def test_a_token_opens_what_its_rights_say(tiny_store, tokens, right):
    token = tokens(rights=[right])
    async with (
        serving(tiny_store, tokens=tokens.file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for method, asked in rights.METHODS.items():
            code = await outcome(channel, method, token)
            denied = code is grpc.StatusCode.PERMISSION_DENIED
            assert denied == (asked not in (right, rights.PUBLIC)), (method, code)
            assert code is not grpc.StatusCode.UNAUTHENTICATED


async def test_operating_is_off_by_default(tiny_store):
    async with serving(tiny_store) as server, grpc.aio.insecure_channel(server.address) as channel:
        for name in ("LoadVariant", "UnloadVariant", "PinVariant"):
            code = await outcome(channel, f"/zen.v1.VariantService/{name}", None)
            assert code is grpc.StatusCode.PERMISSION_DENIED
        code = await outcome(channel, "/zen.v1.VariantService/ListVariants", None)
        assert code is grpc.StatusCode.OK
    async with (
        serving(tiny_store, operators=True, reflection=False) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        code = await outcome(channel, "/zen.v1.VariantService/LoadVariant", None)
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # no name was given
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        with pytest.raises(grpc.RpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_a_tenant_may_not_use_does_not_exist_for_it(tiny_store, tokens):
    token = tokens(tenant="acme", models=["tiny-a"])
    async with serving(tiny_store, tokens=tokens.file) as server:
        access = Access(token)
        async with AsyncZenClient(server.address, ONCE, access) as client:
            listed = await client.list_variants()
            assert [variant.name for variant in listed.variants] == ["tiny-a"]
        async with grpc.aio.insecure_channel(server.address) as channel:
            told = []
            for name in ("tiny-b", "no-such"):
                call = channel.unary_unary("/zen.v1.VariantService/GetVariant")(
                    variants_pb2.GetVariantRequest(name=name).SerializeToString(),
                    metadata=access.metadata,
                )
                assert await call.code() is grpc.StatusCode.NOT_FOUND
                told.append((await call.details()).replace(name, "X"))
            assert told[0] == told[1]


async def test_two_tokens_in_a_call_are_none(tiny_store, tokens):
    header = ("authorization", f"Bearer {tokens()}")
    async with (
        serving(tiny_store, tokens=tokens.file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.unary_unary("/zen.v1.VariantService/ListVariants")(
            b"", metadata=(header, header)
        )
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_headers_without_end_are_refused(tiny_store):
    async with serving(tiny_store) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/zen.v1.VariantService/ListVariants")(
            b"", metadata=[(f"x-{i}", "y" * 8000) for i in range(1280)], timeout=10
        )
        with pytest.raises(grpc.RpcError):
            await call
        assert await call.code() in (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.INTERNAL,  # the client's own, when the stream is reset
        )
        code = await outcome(channel, "/zen.v1.VariantService/ListVariants", None)
        assert code is grpc.StatusCode.OK


# TLS.


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, cert: trustme.LeafCert, authority: trustme.CA) -> TlsFiles:
    cert.private_key_pem.write_to_path(folder / "key.pem")
    cert.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return TlsFiles(folder / "cert.pem", folder / "key.pem")


async def names(server: ZenServer, access: Access) -> list[str]:
    port = server.address.split(":")[1]
    async with AsyncZenClient(f"localhost:{port}", ONCE, access) as client:
        return [variant.name for variant in (await client.list_variants()).variants]


async def test_a_server_with_a_certificate_speaks_nothing_else(
    tiny_store, tmp_path, authority, tokens
):
    files = write(tmp_path, authority.issue_cert("localhost"), authority)
    token = tokens()
    async with serving(tiny_store, tls=files, tokens=tokens.file) as server:
        assert len(await names(server, Access(token, tmp_path / "ca.pem"))) == 3
        with pytest.raises(ZenError, match="UNAVAILABLE"):
            await names(server, Access(token))
        other = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(other)
        with pytest.raises(ZenError, match="UNAVAILABLE"):
            await names(server, Access(token, other))
        with pytest.raises(ZenError, match="UNAUTHENTICATED"):
            await names(server, Access(None, tmp_path / "ca.pem"))


async def test_who_has_to_show_a_certificate(tiny_store, tmp_path, authority):
    files = write(tmp_path, authority.issue_cert("localhost"), authority)
    mutual = TlsFiles(files.certificate, files.key, tmp_path / "ca.pem")
    (tmp_path / "mine").mkdir()
    mine = write(tmp_path / "mine", authority.issue_cert("me@example.org"), authority)
    async with serving(tiny_store, tls=mutual) as server:
        shown = Access(None, tmp_path / "ca.pem", mine.certificate, mine.key)
        assert len(await names(server, shown)) == 3
        with pytest.raises(ZenError, match="UNAVAILABLE"):
            await names(server, Access(None, tmp_path / "ca.pem"))


async def test_a_new_certificate_counts_from_the_next_connection_on(
    tiny_store, tmp_path, authority, caplog
):
    files = write(tmp_path, authority.issue_cert("localhost"), authority)
    async with serving(tiny_store, tls=files) as server:
        assert len(await names(server, Access(None, tmp_path / "ca.pem"))) == 3
        new = trustme.CA()
        write(tmp_path, new.issue_cert("localhost"), new)
        assert len(await names(server, Access(None, tmp_path / "ca.pem"))) == 3
        (tmp_path / "key.pem").write_text("nothing")
        assert len(await names(server, Access(None, tmp_path / "ca.pem"))) == 3
        assert "the certificate stays as it was" in caplog.text


def test_files_that_are_no_certificate(tiny_store, tmp_path, authority):
    files = write(tmp_path, authority.issue_cert("localhost"), authority)
    for wrong in (
        TlsFiles(files.certificate, tmp_path / "none.pem"),
        TlsFiles(files.key, files.key),
        TlsFiles(files.certificate, files.key, files.key),
    ):
        with pytest.raises(TlsFileError, match="cannot be used"):
            ZenServer(Store(tiny_store), ServeOptions(port=0, tls=wrong))


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"token": "a b"}, "no header can hold"),
        ({"token": "a\n"}, "no header can hold"),
        ({"certificate": Path("c")}, "together with its key"),
        ({"certificate": Path("c"), "key": Path("k")}, "the server's roots too"),
    ],
)
def test_an_access_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        Access(**settings)
    assert "secret" not in repr(Access("secret"))


async def test_health_needs_no_token_and_tells_of_a_variant_to_whom_it_may(tiny_store, tokens):
    token = tokens(models=["tiny-a"])
    async with (
        serving(tiny_store, tokens=tokens.file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await server._health.look(frozenset())
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def code(name: str, metadata: Any = ()) -> grpc.StatusCode:
            request = health_pb2.HealthCheckRequest(service=name)
            return await stub.Check(request, metadata=metadata).code()

        assert await code("live") is grpc.StatusCode.OK
        for name in ("variants/tiny-a", "variants/tiny-b", "variants/none"):
            assert await code(name) is grpc.StatusCode.NOT_FOUND
        own = Access(token).metadata
        assert await code("variants/tiny-a", own) is grpc.StatusCode.OK
        assert await code("variants/tiny-b", own) is grpc.StatusCode.NOT_FOUND
        assert await code("live", Access("wrong").metadata) is grpc.StatusCode.UNAUTHENTICATED


# HTTP.


@dataclass
class Reply:
    """A response of the server's HTTP interface."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


async def ask(
    server: ZenServer,
    path: str,
    token: str | None = None,
    method: str = "GET",
    verify: ssl.SSLContext | None = None,
) -> Reply:
    """Asks in the clear, or over TLS by what is trusted."""
    assert server.http is not None
    port = int(server.http.address.split(":")[1])

    def send() -> Reply:
        kinds: Any = (http.client.HTTPConnection, {}) if verify is None else None
        kind, more = kinds or (http.client.HTTPSConnection, {"context": verify})
        with closing(kind("localhost", port, timeout=10, **more)) as connection:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            connection.request(method, path, b"{}", headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read().decode())

    return await asyncio.to_thread(send)


NO_ANSWER = (OSError, http.client.HTTPException)


def concrete(path: str) -> str:
    return path.replace("{name:path}", "tiny-a")


async def test_every_route_has_its_right(tiny_store, tokens):
    given = {right: tokens(rights=[right]) for right in Right}
    async with serving(tiny_store, tokens=tokens.file, http_port=0) as server:
        for path, right in RIGHTS.items():
            method = "POST" if path.endswith("completions") else "GET"
            answer = await ask(server, concrete(path), method=method)
            assert (answer.status_code == 401) == (right is not None)
            if right is not None:
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for held, token in given.items():
                answer = await ask(server, concrete(path), token, method)
                assert (answer.status_code == 403) == (right not in (held, None))
            wrong = await ask(server, concrete(path), "wrong", method)
            assert wrong.status_code == 401
        app: Any = server.http._config.app
        routes = {route.path for route in app.routes}
        assert routes == set(RIGHTS)


async def test_a_tenant_sees_its_models_over_http_alone(tiny_store, tokens):
    token = tokens(models=["tiny-a", "tiny-c"])
    async with serving(tiny_store, tokens=tokens.file, http_port=0) as server:
        listed = (await ask(server, "/v1/models", token)).json()["data"]
        assert [model["id"] for model in listed] == ["tiny-a", "tiny-c"]
        hidden = await ask(server, "/v1/models/tiny-b", token)
        absent = await ask(server, "/v1/models/no-such", token)
        assert hidden.status_code == absent.status_code == 404
        assert hidden.text.replace("tiny-b", "X") == absent.text.replace("no-such", "X")
        assert (await ask(server, "/v1/models/tiny-a", token)).status_code == 200


async def test_http_has_the_certificate_too(tiny_store, tmp_path, authority):
    files = write(tmp_path, authority.issue_cert("localhost"), authority)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with serving(tiny_store, tls=files, http_port=0) as server:
        assert (await ask(server, "/v1/models", verify=trusted)).status_code == 200
        with pytest.raises(NO_ANSWER):
            await ask(server, "/v1/models")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(server, "/v1/models", verify=ssl.create_default_context())
    mutual = TlsFiles(files.certificate, files.key, tmp_path / "ca.pem")
    async with serving(tiny_store, tls=mutual, http_port=0) as server:
        with pytest.raises(NO_ANSWER):
            await ask(server, "/v1/models", verify=trusted)
        (tmp_path / "mine").mkdir()
        mine = write(tmp_path / "mine", authority.issue_cert("me@example.org"), authority)
        trusted.load_cert_chain(mine.certificate, mine.key)
        assert (await ask(server, "/v1/models", verify=trusted)).status_code == 200
        # Another authority: who had a certificate of the first is not known any more.
        new = trustme.CA()
        (tmp_path / "theirs").mkdir()
        theirs = write(tmp_path / "theirs", new.issue_cert("they@example.org"), new)
        new.cert_pem.write_to_path(tmp_path / "ca.pem")
        known = ssl.create_default_context()
        authority.configure_trust(known)
        known.load_cert_chain(theirs.certificate, theirs.key)
        for _ in range(100):
            if await knows(server, known):
                break
            await asyncio.sleep(0.1)  # the server looks at its files once a second
        assert await knows(server, known)
        with pytest.raises(NO_ANSWER):
            await ask(server, "/v1/models", verify=trusted)


async def knows(server: ZenServer, context: ssl.SSLContext) -> bool:
    with contextlib.suppress(*NO_ANSWER):
        return (await ask(server, "/v1/models", verify=context)).status_code == 200
    return False
