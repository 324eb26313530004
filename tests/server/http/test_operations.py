"""How a server with an engine does, as its operators are told; and the traces of its calls."""

import json
import logging
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from server import cli, rights
from server.app import ZenServer
from server.client import ZenClient, ZenError
from server.client_operations import OperationsClient
from server.operations import told
from server.profiles import Profiles
from server.recent import Summary


@pytest.fixture
def operations(server: ZenServer):
    with OperationsClient(server.address) as client:
        yield client


def test_a_server_as_it_is(server: ZenServer, operations: OperationsClient):
    with ZenClient(server.address) as client:
        client.generate("tiny-b", "abc", max_tokens=40, ignore_eos=True)
        before = operations.status()
        client.generate("tiny-b", "abc", max_tokens=40, ignore_eos=True)
        client.generate("base", "abc", max_tokens=40, ignore_eos=True)
    seen = operations.status()
    assert (seen.rows, seen.slots, seen.rows_in_use, seen.waiting) == (2, 2, 0, 0)
    assert seen.recent.finished == before.recent.finished + 2
    assert seen.recent.ttft_p50.ToNanoseconds() > 0 and seen.recent.tpot_p99.ToNanoseconds() > 0
    models = {model.name: model for model in seen.models}
    assert seen.models[0].name == "base" and models["base"].ttft_p50.ToNanoseconds() > 0
    assert models["tiny-b"].state == "resident" and models["tiny-b"].HasField("slot")
    assert models["tiny-b"].requests_per_s > 0 and models["tiny-b"].version == 1
    assert seen.uptime.ToNanoseconds() > seen.recent.window.ToNanoseconds() - 1e9


def test_the_command_shows_it_once_and_as_figures(server: ZenServer, capsys):
    with ZenClient(server.address) as client:
        client.generate("tiny-b", "abc", max_tokens=3)
    assert cli.run(["status", "--address", server.address]) == 0
    shown = capsys.readouterr().out
    assert "tiny-b" in shown and "resident" in shown and "TTFT P50" in shown
    assert cli.run(["status", "--address", server.address, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == 2 and figures["recent"]["ttft_p50_s"] > 0
    assert type(figures["loads"]) is int and figures["models"][0]["name"] == "base"


def test_a_call_is_a_child_of_its_callers_span(server: ZenServer, collector: Any):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with ZenClient(server.address) as client:
        client._metadata = (
            ("traceparent", f"00-{trace}-{parent}-01"),
            ("x-request-id", "traced-1"),
        )
        answer = client.generate("tiny-c", "abc", max_tokens=3, ignore_eos=True)
    spans = collector.of(trace, 5)
    whole = spans["Generate"]
    assert whole.parent_span_id.hex() == parent
    said = {each.key: each.value for each in whole.attributes}
    assert said["zen.request.id"].string_value == "traced-1"
    assert said["gen_ai.usage.output_tokens"].int_value == len(answer.token_ids) == 3
    parts = [spans[name] for name in ("prepare", "queue", "prefill", "decode")]
    assert all(part.parent_span_id == whole.span_id for part in parts)
    for before, after in zip(parts, parts[1:], strict=False):
        assert before.end_time_unix_nano <= after.start_time_unix_nano
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano


@pytest.fixture
def profiles(server: ZenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server with a folder for recordings, and callers who may ask for them."""
    monkeypatch.setattr(server._operations, "_profiles", Profiles(tmp_path / "profiles"))
    monkeypatch.setattr(server._gate, "_anybody", rights.OPERATOR)
    return tmp_path / "profiles"


def test_a_recording_is_made_beside_requests(
    server: ZenServer, profiles: Path, operations: OperationsClient, capsys
):
    answers: list[Any] = []

    def ask() -> None:
        with ZenClient(server.address) as client:
            answers.append(client.generate("base", "abc", max_tokens=20, ignore_eos=True))

    caller = threading.Thread(target=ask)
    caller.start()
    assert cli.run(["profile", "--address", server.address, "--seconds", "0.3", "--json"]) == 0
    caller.join()
    made = json.loads(capsys.readouterr().out)
    folder = profiles / made["name"]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name.endswith(".xplane.pb") for path in files)
    assert made["bytes"] == sum(path.stat().st_size for path in files) > 0
    assert profiles.stat().st_mode & 0o077 == folder.stat().st_mode & 0o077 == 0
    assert len(answers[0].token_ids) == 20


def test_one_recording_at_a_time(
    server: ZenServer, profiles: Path, operations: OperationsClient, monkeypatch
):
    kept = server._operations._profiles
    assert kept is not None and kept._lock.acquire(blocking=False)
    with pytest.raises(ZenError, match="a profile is being recorded") as caught:
        operations.capture_profile(0.1)
    assert caught.value.code == "RESOURCE_EXHAUSTED" and caught.value.retry_after_s
    kept._lock.release()
    for seconds in (-1.0, 61.0):
        with pytest.raises(ZenError, match="expected more than 0 and at most 60"):
            operations.capture_profile(seconds)


def test_recordings_need_a_right_and_a_folder(
    server: ZenServer, operations: OperationsClient, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ZenError) as caught:
        operations.capture_profile(0.1)
    assert caught.value.code == "PERMISSION_DENIED"
    monkeypatch.setattr(server._gate, "_anybody", rights.OPERATOR)
    with pytest.raises(ZenError, match="--profiles") as caught:
        operations.capture_profile(0.1)
    assert caught.value.code == "FAILED_PRECONDITION"


def test_a_folder_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="profiles is .* cannot be written"):
        Profiles(tmp_path / "file" / "inside")


def test_a_server_that_has_answered_nothing(server: ZenServer):
    seen = server.worker.snapshot()
    made = told(seen, Summary(0.0, 0, 0, 0.0, 0.0, None, None, {}), 1.0)
    assert not made.recent.HasField("ttft_p50") and not made.models[0].HasField("ttft_p50")


def test_what_does_not_answer_is_one_line(capsys: Any):
    with closing(socket.socket()) as unheard:
        unheard.bind(("127.0.0.1", 0))
        assert cli.run(["status", "--address", f"127.0.0.1:{unheard.getsockname()[1]}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_id_that_the_log_has(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture, stream: bool
):
    caplog.set_level(logging.INFO, logger="server.call_log")
    asked = client.completions.with_raw_response.create
    made = asked(model="base", prompt=["a", "b"], max_tokens=1, stream=stream)
    made.http_response.read()
    own = made.headers["x-request-id"]
    assert logged(caplog) == [own, f"{own}/1"]
    headers = {"x-request-id": "mine-1"}
    named = asked(model="base", prompt="a", max_tokens=1, extra_headers=headers)
    assert named.headers["x-request-id"] == "mine-1"
    for given in ("x" * 64, ""):
        ids = {"x-request-id": given}
        two = asked(model="base", prompt=["a", "b"], max_tokens=1, extra_headers=ids)
        made_up = two.headers["x-request-id"]
        assert made_up == given or (given == "" and len(made_up) == 32)
        caplog.clear()
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="none", prompt="a", extra_headers=headers)
    assert refused.value.request_id == "mine-1"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="base", prompt="a", extra_headers={"x-request-id": "?"})
    assert bad.value.request_id is None
    assert logged(caplog) == ["", "mine-1"]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ids of the calls that have ended."""
    calls = [record for record in caplog.records if hasattr(record, "call")]
    return sorted(vars(record)["request_id"] for record in calls)
