"""`zen serve` as a process of its own, from the line that says it is ready to a signal's end."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from server.client import AsyncZenClient, ZenError
from server.client_retries import Retries


@pytest.fixture
def serving(tiny_store, compiled):
    """`zen serve` in a process of its own, ready: (process, address, address of HTTP)."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    arguments = ("serve", tiny_store, "--port", 0, "--http-port", 0, "--rows", 2)
    arguments += ("--max-length", 64)
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    told = r"ready on (\S+), over HTTP on (\S+): base, tiny-a, tiny-b, tiny-c\n"
    ready = re.fullmatch(told, line)
    assert ready, line + process.communicate()[1]
    yield process, ready[1], ready[2]
    process.kill()
    process.communicate()


async def signalled_under_load(process, address: str, number: int) -> None:
    """Two rows run and others wait when the signal comes; who comes later is refused."""
    async with AsyncZenClient(address, Retries(attempts=1)) as client:
        names = ("tiny-a", "base", "tiny-b", "tiny-c", "tiny-a", "base")
        streams = [client.stream(n, "Hi", max_tokens=60, ignore_eos=True) for n in names]

        async def read(stream) -> str:
            try:
                async for _ in stream:
                    pass
            except ZenError as error:
                return error.code
            return "OK"

        begun = aiter(streams[0])
        await anext(begun)
        others = [asyncio.ensure_future(read(stream)) for stream in streams[1:]]
        process.send_signal(number)
        assert await read(begun) == "OK"
        ends = ["OK", *await asyncio.gather(*others)]
        for end, stream in zip(ends, streams, strict=True):
            # What was taken finished; what was not, for it came too late, was told so at once.
            tokens = len(stream.generation.token_ids)
            assert (end, tokens) in (("OK", 60), ("UNAVAILABLE", 0))
        with pytest.raises(ZenError, match="UNAVAILABLE"):
            while True:  # until it has seen the signal
                await client.generate("base", "Hi", max_tokens=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_was_taken_finish(serving, number):
    process, address, http_address = serving
    over_http = http.client.HTTPConnection(http_address, timeout=30)
    fields = {"model": "tiny-a", "prompt": "Hi", "max_tokens": 60, "ignore_eos": True}
    with contextlib.closing(over_http):
        over_http.request("POST", "/v1/completions", json.dumps(fields | {"stream": True}))
        answer = over_http.getresponse()
        answer.readline()
        asyncio.run(signalled_under_load(process, address, number))
        assert answer.read().endswith(b"data: [DONE]\n\n")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "INFO server.loader: read tiny-a version 1" in err
    assert "INFO server.loader: loaded tiny-a version 1" in err
    assert "INFO server.app: stopping: " in err
    assert all(" INFO server." in line for line in err.splitlines())
