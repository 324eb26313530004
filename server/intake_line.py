"""Adapters that are asked for and are not in the pool: who waits for one, and which is taken in.

A pure table and its transitions. Adapters are taken in one at a time, in the order in which they
were asked for, each once for all who ask. One that nobody waits for any more is not begun; one that
is being taken in goes on, since the next who asks will want it. What was refused is remembered for
a while, unless the adapter's files or the pool have changed since.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from server.requests import FailureKind

type Holder = int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an adapter was not taken in.

    Attributes:
        kind: as in `server.requests.Failure`.
        message: fit for clients.
        remember_s: for how long it is said to all who ask.
    """

    kind: FailureKind
    message: str
    remember_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """Take this adapter in, then say `ended`."""

    name: str


@dataclass(frozen=True, slots=True)
class Tell:
    """A holder waits no longer: its adapter is there, or `verdict` says why not."""

    holder: Holder
    verdict: Verdict | None
    retry_after_s: float | None = None


type LineAction = Begin | Tell
type LineStep = tuple[Line, tuple[LineAction, ...]]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A verdict, of what it was (see `server.intakes.Pooled`), and until when it is said."""

    verdict: Verdict
    mark: str
    until: float


@dataclass(frozen=True, slots=True)
class Line:
    """The table; each method returns the next one, and what is to be done.

    Attributes:
        waiting: by name, in the order in which they were first asked for, who waits.
        running: the adapter that is being taken in.
        refused: by name, what was said of it.
    """

    waiting: Mapping[str, frozenset[Holder]] = field(default_factory=lambda: MappingProxyType({}))
    running: str | None = None
    refused: Mapping[str, Remembered] = field(default_factory=lambda: MappingProxyType({}))

    def ask(self, holder: Holder, name: str, mark: str, now: float) -> LineStep:
        """Waits for an adapter, or is told at once what was found of it.

        Args:
            holder: never used before.
            name: the adapter.
            mark: of its files and the pool as they are.
            now: in seconds.
        """
        known = {n: r for n, r in self.refused.items() if now < r.until}
        said = known.get(name)
        line = replace(self, refused=MappingProxyType(known))
        if said is not None and said.mark == mark:
            return line, (Tell(holder, said.verdict, said.until - now),)
        waiting = {**self.waiting, name: self.waiting.get(name, frozenset()) | {holder}}
        return replace(line, waiting=MappingProxyType(waiting))._next()

    def leave(self, holder: Holder) -> Line:
        """Waits no longer."""
        left = {name: holders - {holder} for name, holders in self.waiting.items()}
        left = {name: holders for name, holders in left.items() if holders}
        return replace(self, waiting=MappingProxyType(left))

    def ended(self, verdict: Verdict | None, mark: str, now: float) -> LineStep:
        """The adapter that ran is in the pool, or refused; the next one begins."""
        name, refused = self.running, dict(self.refused)
        assert name is not None
        refused.pop(name, None)
        retry = None
        if verdict is not None:
            refused[name] = Remembered(verdict, mark, now + verdict.remember_s)
            retry = verdict.remember_s
        told = tuple(Tell(h, verdict, retry) for h in sorted(self.waiting.get(name, ())))
        waiting = {n: holders for n, holders in self.waiting.items() if n != name}
        line = Line(MappingProxyType(waiting), None, MappingProxyType(refused))
        line, begun = line._next()
        return line, (*told, *begun)

    def _next(self) -> LineStep:
        if self.running is not None or not self.waiting:
            return self, ()
        name = next(iter(self.waiting))
        return replace(self, running=name), (Begin(name),)
