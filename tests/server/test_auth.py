"""Tokens in their file, quotas, and who may do what."""

import contextlib
import hmac
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server import auth, cli
from server.auth import (
    Identity,
    NotAuthenticated,
    Right,
    TokenFileError,
    Tokens,
    new_token,
    read_tokens,
    revoke_token,
)
from server.quota import Quotas, QuotaSpent


class Clock:
    """A clock that goes when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_a_token_is_known_by_its_hash_alone(file: Path):
    token = new_token(file, tenant="acme", models=["zen4-math"], rights=[Right.generate])
    assert token.startswith("zen_") and len(token) == 60
    secret = token.split("_", 2)[2]
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    identity = Tokens(file).identify(token)
    assert (identity.tenant, identity.token) == ("acme", token.split("_")[1])
    assert identity.may_use("zen4-math") and not identity.may_use("base")
    assert identity.may(Right.generate) and not identity.may(Right.operate)
    assert secret not in repr(identity)


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: token.replace("zen_", "zen_0", 1),
        lambda token: token[:-1],
        lambda token: token + "x",
        lambda token: token.upper(),
        lambda token: "",
        lambda token: "zen_" + "0" * 12 + token[16:],
    ],
)
def test_what_is_not_the_token_is_not_let_in(file: Path, change: Any):
    token = new_token(file)
    with pytest.raises(NotAuthenticated, match="unknown or has expired") as caught:
        Tokens(file).identify(change(token))
    assert token[20:30] not in str(caught.value)


def test_a_secret_is_compared_in_constant_time_whether_or_not_the_id_is_known(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the library's own comparison, once for each attempt, over digests of one length."""
    lengths: list[tuple[int, int]] = []
    library = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return library(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    token = new_token(file)
    tokens = Tokens(file)
    tokens.identify(token)
    for wrong in (token[:-1] + "-", "zen_" + "0" * 12 + "_" + "x" * 43, "nonsense"):
        with pytest.raises(NotAuthenticated):
            tokens.identify(wrong)
    assert lengths == [(32, 32)] * 4


def test_a_token_expires(file: Path, clock: Clock):
    token = new_token(file, days=1)
    tokens = Tokens(file, today=clock)
    assert tokens.identify(token)
    clock.now = 4e9
    with pytest.raises(NotAuthenticated):
        tokens.identify(token)


def test_tokens_come_and_go_without_a_restart(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
):
    first = new_token(file)
    tokens = Tokens(file, clock)
    second = new_token(file)
    revoke_token(file, first.split("_")[1])
    assert tokens.identify(first), "it looks once a second"
    clock.now = 1.0
    assert tokens.identify(second)
    with pytest.raises(NotAuthenticated):
        tokens.identify(first)
    known = file.read_text()
    file.write_text("{")
    clock.now = 2.0
    assert tokens.identify(second), "a file that cannot be read changes nothing"
    assert "the tokens stay as they were" in caplog.text
    file.chmod(0o660)
    file.write_text(known.replace(second.split("_")[1], "0" * 12))
    clock.now = 3.0
    assert tokens.identify(second), "others could write the file"
    file.chmod(0o600)
    clock.now = 4.0
    with pytest.raises(NotAuthenticated):
        tokens.identify(second)
    with pytest.raises(TokenFileError, match="no token of the id"):
        new_token(file.with_name("other"))
        revoke_token(file.with_name("other"), first.split("_")[1])


def test_tokens_that_are_made_at_the_same_time_are_all_there(file: Path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: new_token(file, tenant=f"t{i}"), range(24)))
    tokens = Tokens(file)
    assert {tokens.identify(token).tenant for token in made} == {f"t{i}" for i in range(24)}


def test_a_change_keeps_mode_and_owner_and_follows_a_link(file: Path, monkeypatch: Any):
    kept = file.with_name("kept.json")
    new_token(kept)
    kept.chmod(0o640)
    file.symlink_to(kept)
    owned: list[tuple[int, int]] = []
    monkeypatch.setattr(auth.os, "fchown", lambda handle, uid, gid: owned.append((uid, gid)))
    token = new_token(file)
    assert file.is_symlink() and Tokens(kept).identify(token)
    found = kept.stat()
    assert stat.S_IMODE(found.st_mode) == 0o640 and owned == [(found.st_uid, found.st_gid)]
    assert {entry.name for entry in file.parent.iterdir()} == {file.name, kept.name}


def entry(**changes: Any) -> dict[str, Any]:
    return {"id": "0" * 12, "sha256": "0" * 64, **changes}


@pytest.mark.parametrize(
    "tokens, says",
    [
        ([entry(id="x")], r"tokens\[0\].id is missing or wrong; expected 12 hexadecimal"),
        ([entry(sha256="ff")], "sha256 is missing or wrong"),
        ([entry(tenant="a/b")], "tenant is missing or wrong"),
        ([entry(models="zen4-math")], "models is missing or wrong"),
        ([entry(models=[1])], "models is missing or wrong"),
        ([entry(rights=["rule"])], "rights is missing or wrong"),
        ([entry(expires="soon")], "expires is missing or wrong"),
        ([entry(expires="2027-01-01T00:00:00")], "a time with its zone"),
        ([entry(most_requests=0)], "most_requests is missing or wrong"),
        ([entry(tokens_per_minute=True)], "tokens_per_minute is missing or wrong"),
        ([entry(secret="hush")], "a field of another name"),
        ([entry(), entry()], r"tokens\[1\] has the id of another"),
        (["x"], "is not an object"),
        ("x", "is not JSON of the form"),
    ],
)
def test_a_file_that_is_none_is_refused_and_not_repeated(file: Path, tokens: Any, says: str):
    file.write_text(json.dumps({"tokens": tokens}))
    file.chmod(0o600)
    with pytest.raises(TokenFileError, match=says) as caught:
        read_tokens(file)
    assert "hush" not in str(caught.value)


def test_a_file_that_others_may_write_is_refused(file: Path):
    new_token(file)
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(TokenFileError, match="only its owner may write"):
            Tokens(file)
    with pytest.raises(TokenFileError, match="No such file"):
        Tokens(file.with_name("none"))
    with pytest.raises(TokenFileError, match="cannot be read|plain file"):
        Tokens(file.parent)


# Quotas.


def test_a_tenant_has_so_many_requests_at_a_time(clock: Clock):
    quotas = Quotas(clock)
    acme, other = Identity("1", "acme", most_requests=2), Identity("2", "other", most_requests=1)
    with quotas.running(acme), quotas.running(acme):
        with pytest.raises(QuotaSpent, match="2 requests of this tenant"), quotas.running(acme):
            pass
        with quotas.running(other):
            pass
    with quotas.running(acme), quotas.running(acme):
        pass


def test_a_tenant_has_so_many_tokens_a_minute(clock: Clock):
    quotas = Quotas(clock)
    acme = Identity("1", "acme", tokens_per_minute=600)

    def take(prompt: int, answers: int, used: int) -> None:
        with quotas.spending(acme, prompt, answers, lambda: used):
            pass

    take(100, 400, 400)
    with pytest.raises(QuotaSpent, match="had 500 of its 600") as caught:
        take(100, 100, 0)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now += 10
    take(100, 100, 0)  # what was not used comes back
    take(100, 0, 0)
    clock.now += 60
    take(10_000, 0, 0)  # more than a minute's worth, where nothing else was had
    with pytest.raises(QuotaSpent):
        take(1, 0, 0)


@pytest.mark.parametrize("beside", [None, 60, 6000])
def test_a_token_of_another_limit_neither_uses_up_nor_holds_what_was_had(
    clock: Clock, beside: int | None
):
    quotas = Quotas(clock)
    acme = Identity("1", "acme", tokens_per_minute=600)
    other = Identity("2", "acme", tokens_per_minute=beside)

    def take(identity: Identity, prompt: int) -> None:
        with quotas.running(identity), quotas.spending(identity, prompt, 0, lambda: 0):
            pass

    take(acme, 500)
    for _ in range(30):
        clock.now += 1
        with contextlib.suppress(QuotaSpent):
            take(other, 10)
    with pytest.raises(QuotaSpent, match="had 200 of its 600") as caught:
        take(acme, 500)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now += 10
    take(acme, 500)


def test_what_a_failed_answer_did_not_use_comes_back(clock: Clock):
    quotas = Quotas(clock)
    acme = Identity("1", "acme", tokens_per_minute=600)
    with pytest.raises(KeyError), quotas.spending(acme, 100, 500, lambda: 7):
        raise KeyError
    with quotas.spending(acme, 400, 93, lambda: 0):
        pass


@pytest.mark.parametrize(
    "options, says",
    [
        (("--tenant", ""), "--tenant is empty"),
        (("--tenant", "x", "--days", "inf"), "--days"),
        (("--tenant", "x", "--days", "1e300"), "--days"),
        (("--tenant", "x", "--model", "../x"), "no model can be called so"),
        (("--tenant", "a/b"), "tenant is missing or wrong"),
        ((), "--tenant"),
    ],
)
def test_a_token_that_cannot_be_is_one_line(
    file: Path, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["token", "new", str(file), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
    assert not file.exists()


def test_tokens_by_command(file: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["token", "new", str(file), "--tenant", "acme", "--model", "base"]) == 0
    token = capsys.readouterr().out.strip()
    assert Tokens(file).identify(token).tenant == "acme"
    assert cli.run(["token", "ls", str(file)]) == 0
    listed = capsys.readouterr().out
    assert "acme" in listed and "base" in listed and token.split("_", 2)[2] not in listed
    assert cli.run(["token", "revoke", str(file), token.split("_")[1]]) == 0
    with pytest.raises(NotAuthenticated):
        Tokens(file).identify(token)
