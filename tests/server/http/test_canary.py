"""A text that must not turn up anywhere but in the answer: not in logs, errors, metrics, traces."""

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from server.app import ZenServer
from server.call_log import WithRequest, formatter
from server.client import ZenClient, ZenError
from server.client_operations import OperationsClient
from server.client_retries import Retries

CANARY = "canary7f3a91"


def test_what_users_write_is_nowhere_else(
    server: ZenServer,
    post: Callable[[str, bytes], tuple[int, bytes]],
    collector: Any,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(formatter("json"))
    handler.addFilter(WithRequest())
    logging.getLogger().addHandler(handler)
    said: list[str] = []
    bodies: list[dict[str, Any]] = [
        {"prompt": CANARY, "max_tokens": 2},
        {"prompt": CANARY, "max_tokens": 10**9},
        {"prompt": CANARY * 200},
        {"prompt": CANARY, "temperature": "hot"},
        {"prompt": [CANARY, 3]},
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": CANARY, "x": 1}]}]},
        {"prompt": "a", "stop": [CANARY] * 100},
    ]
    for fields in bodies:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        code, body = post(path, json.dumps({"model": "tiny-a", **fields}).encode())
        if code != 200:
            said.append(body.decode())
    said.append(post("/v1/completions", f'{{"prompt": "{CANARY}'.encode())[1].decode())
    with ZenClient(server.address, Retries(attempts=1)) as client:
        client.generate("tiny-a", CANARY, max_tokens=2)
        for options in ({"max_tokens": -1}, {"stop": [CANARY] * 100}, {"timeout_s": 1e-4}):
            with pytest.raises(ZenError) as caught:
                client.generate("tiny-a", CANARY * 20, **options)
            said.append(str(caught.value))
    trace = "5ca1ab1e" * 4
    with ZenClient(server.address, Retries(attempts=1)) as client:
        client._metadata = (("traceparent", f"00-{trace}-{'12' * 8}-01"),)
        client.generate("tiny-a", CANARY, max_tokens=2)
    collector.of(trace, 4)
    logging.getLogger().removeHandler(handler)
    said.append(lines.getvalue())
    assert said[-1].count('"call"') > len(bodies)
    said.append(repr(collector.spans))
    with OperationsClient(server.address) as operations:
        said.append(repr(operations.status()))
    said += [server._observing.metrics.text().decode(), repr(server.worker.snapshot())]
    assert "zen_requests_total" in said[-2]
    for text in (caplog.text, *said):
        assert "7f3a91" not in text
