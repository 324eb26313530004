"""Who calls, and what they may: tokens, tenants and rights.

A token is `zen_ID_SECRET`, with a secret of 256 random bits. The file holds its SHA-256 and what it
allows, never the token. It is read again when it changes, so tokens come and go without a restart;
a file that cannot be read changes nothing, and the log says so.

Without a file everyone may generate and list, and nobody may operate unless the server is started
to let them.
"""

from __future__ import annotations

import contextvars
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from server.file_marks import mark

_log = logging.getLogger(__name__)

_TOKEN = re.compile(r"zen_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 16 << 20


class Right(StrEnum):
    """What a token may allow.

    Attributes:
        generate: ask for answers, of the models that it names.
        list: see these models and where they are.
        operate: load, unload and pin variants, profile, see all of them.
        observe: read metrics and the server's state.
    """

    generate = "generate"
    list = "list"
    operate = "operate"
    observe = "observe"


@dataclass(frozen=True)
class Identity:
    """A caller.

    Attributes:
        token: the id of its token, "" for anybody.
        tenant: whose it is; tenants share no pages of the cache and no quota.
        models: names that it may ask for, the base among them if so; None is all.
        rights: what it may do.
        most_requests: at a time; None sets no bound.
        tokens_per_minute: of prompts and answers; None sets no bound.
    """

    token: str = ""
    tenant: str = ""
    models: frozenset[str] | None = None
    rights: frozenset[Right] = frozenset()
    most_requests: int | None = None
    tokens_per_minute: int | None = None

    def may(self, right: Right) -> bool:
        """Whether it has a right."""
        return right in self.rights

    def may_use(self, model: str) -> bool:
        """Whether it may know of a model; operators know of all."""
        return self.models is None or model in self.models or self.may(Right.operate)

    def asking(self) -> Identity:
        """The same without an operator's sight: answers come from models that the token names."""
        return replace(self, rights=self.rights - {Right.operate})


_EVERYONE = frozenset({Right.generate, Right.list, Right.observe})
ANYBODY = Identity(rights=_EVERYONE)
OPERATOR = Identity(rights=_EVERYONE | {Right.operate})

_identity: contextvars.ContextVar[Identity] = contextvars.ContextVar("identity", default=ANYBODY)


def caller() -> Identity:
    """Who made the call that is being answered."""
    return _identity.get()


def answering(identity: Identity) -> None:
    """Notes who made the call that this task answers."""
    _identity.set(identity)


class NotAuthenticated(Exception):
    """The caller did not say who it is, or not so that it is believed."""


class TokenFileError(ValueError):
    """The file of tokens cannot be used; it says why, and repeats nothing of it."""


@dataclass(frozen=True)
class _Entry:
    """A token as the file has it."""

    digest: bytes
    expires: float | None
    identity: Identity = field(repr=False)


# What the secret of a token that nobody has is compared with: that takes as long.
_NOBODY = _Entry(hashlib.sha256(b"").digest(), None, Identity())


class Tokens:
    """The tokens of a file, from any thread."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file.

        Args:
            clock: in seconds, for when to look at the file again.
            today: in seconds since 1970, for when tokens expire.

        Raises:
            TokenFileError: it cannot be read, or others could change it.
        """
        self._path, self._clock, self._today = path, clock, today
        self._lock = threading.Lock()
        self._mark = mark(path)
        self._entries = read_tokens(path)
        self._looked_at = clock()

    def identify(self, token: str) -> Identity:
        """Who has a token.

        Raises:
            NotAuthenticated: nobody, or not any more; it does not say which.
        """
        match = _TOKEN.fullmatch(token)
        key, secret = match.groups() if match else ("", token)
        entry = self._current().get(key, _NOBODY)
        given = hashlib.sha256(secret.encode()).digest()
        same = hmac.compare_digest(given, entry.digest)
        if not same or entry is _NOBODY:
            raise NotAuthenticated("the token is unknown or has expired")
        if entry.expires is not None and entry.expires <= self._today():
            raise NotAuthenticated("the token is unknown or has expired")
        return entry.identity

    def _current(self) -> Mapping[str, _Entry]:
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            return self._entries

    def _look(self) -> None:
        before, self._mark = self._mark, mark(self._path)
        if self._mark == before:
            return
        try:
            self._entries = read_tokens(self._path)
        except TokenFileError as error:
            _log.error("the tokens stay as they were: %s", error)
        else:
            _log.info("%d tokens are known now", len(self._entries))


def read_tokens(path: Path) -> dict[str, _Entry]:
    """Reads a file of tokens.

    Returns:
        By the tokens' ids, what each allows.

    Raises:
        TokenFileError: it is missing, not what it should be, or others than its owner may write it.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise TokenFileError(f"the file of tokens cannot be read: {why}") from None
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TokenFileError(
            f"the file of tokens has mode {stat.S_IMODE(mode):o}; expected a plain file that only "
            "its owner may write, as after chmod 600"
        )
    try:
        if len(data) > _MAX_FILE_BYTES:
            raise TokenFileError(f"the file of tokens is larger than {_MAX_FILE_BYTES} bytes")
        document = json.loads(data)
        listed = document["tokens"]
        if set(document) != {"tokens"} or not isinstance(listed, list):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TokenFileError('the file of tokens is not JSON of the form {"tokens": []}') from None
    entries = {}
    for i, item in enumerate(listed):
        key, entry = _entry(item, f"tokens[{i}]")
        if key in entries:
            raise TokenFileError(f"tokens[{i}] has the id of another")
        entries[key] = entry
    return entries


_FIELDS = {
    "id", "sha256", "tenant", "models", "rights", "expires", "most_requests", "tokens_per_minute",
}  # fmt: skip


def _entry(item: Any, where: str) -> tuple[str, _Entry]:
    def wrong(name: str, expected: str) -> TokenFileError:
        return TokenFileError(f"{where}.{name} is missing or wrong; expected {expected}")

    if not isinstance(item, dict):
        raise TokenFileError(f"{where} is not an object")
    unknown = sorted(set(item) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise TokenFileError(f"{where} has a field of another name than {known}")
    key, digest, tenant = item.get("id"), item.get("sha256"), item.get("tenant", "")
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{12}", key):
        raise wrong("id", "12 hexadecimal digits")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise wrong("sha256", "64 hexadecimal digits")
    if not isinstance(tenant, str) or (tenant and not _NAME.fullmatch(tenant)):
        raise wrong("tenant", "a name of letters, digits, dots, underscores and hyphens")
    models = item.get("models", "*")
    if models != "*" and not _texts(models):
        raise wrong("models", 'a list of names, or "*" for all')
    rights = item.get("rights", [Right.generate, Right.list])
    if not _texts(rights) or not set(rights) <= set(Right):
        raise wrong("rights", f"a list of {', '.join(Right)}")
    for name in ("most_requests", "tokens_per_minute"):
        value = item.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise wrong(name, "a whole number from 1 on")
    identity = Identity(
        key,
        tenant,
        None if models == "*" else frozenset(models),
        frozenset(map(Right, rights)),
        item.get("most_requests"),
        item.get("tokens_per_minute"),
    )
    return key, _Entry(bytes.fromhex(digest), _expiry(item.get("expires"), wrong), identity)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _expiry(value: Any, wrong: Callable[[str, str], TokenFileError]) -> float | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise wrong("expires", "a time such as 2027-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise wrong("expires", "a time with its zone, such as 2027-01-31T12:00:00Z")
    return moment.timestamp()


def new_token(
    path: Path,
    *,
    tenant: str = "",
    models: Iterable[str] | None = None,
    rights: Iterable[Right] = (Right.generate, Right.list),
    days: float | None = None,
    most_requests: int | None = None,
    tokens_per_minute: int | None = None,
) -> str:
    """Adds a token to a file, which is made where there is none, for its owner alone.

    Args:
        models: names that it may ask for; None is all.
        days: until it expires; None is never.

    Returns:
        The token: it stands nowhere else.

    Raises:
        TokenFileError: the file cannot be used, or the token would be none.
    """
    key, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    item: dict[str, Any] = {
        "id": key,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "tenant": tenant,
        "models": "*" if models is None else sorted(models),
        "rights": sorted(rights),
    }
    if days is not None:
        moment = datetime.fromtimestamp(time.time() + days * 86400, UTC)
        item["expires"] = moment.isoformat(timespec="seconds")
    limits = {"most_requests": most_requests, "tokens_per_minute": tokens_per_minute}
    item |= {name: value for name, value in limits.items() if value is not None}
    _entry(item, "the token")
    with _changing(path):
        known = read_raw(path) if path.exists() else []
        _write(path, [*known, item])
    return f"zen_{key}_{secret}"


def revoke_token(path: Path, key: str) -> None:
    """Takes a token out of a file by its id.

    Raises:
        TokenFileError: the file cannot be used, or has no such token.
    """
    with _changing(path):
        known = read_raw(path)
        left = [item for item in known if item["id"] != key]
        if len(left) == len(known):
            raise TokenFileError(
                f"there is no token of the id {key!r}; `zen token ls` shows those known"
            )
        _write(path, left)


def read_raw(path: Path) -> list[dict[str, Any]]:
    """The entries of a file as they stand in it; the hashes among them.

    Raises:
        TokenFileError: as `read_tokens`.
    """
    read_tokens(path)
    return json.loads(path.read_bytes())["tokens"]


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One change of a file at a time: its folder is locked meanwhile."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise TokenFileError(f"the file of tokens cannot be written: {why}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, items: list[dict[str, Any]]) -> None:
    """All of it or nothing, for the owner alone, who stays the same; links are followed."""
    path = path.resolve()
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        before = path.stat() if path.exists() else None
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            if before is not None:
                os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            json.dump({"tokens": items}, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        why = os.strerror(error.errno or 0)
        raise TokenFileError(f"the file of tokens cannot be written: {why}") from None
