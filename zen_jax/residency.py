"""The words of the delta cache: its settings, where a variant can be, what is to be done.

Plain frozen values; `zen_jax.delta_cache` decides over them.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Digest = str
type Holder = int
type LoadFailureKind = Literal["load_failed", "corrupt", "does_not_fit"]
type RefusalKind = Literal["load_failed", "corrupt", "does_not_fit", "exhausted", "withdrawn"]
type Retiring = Literal["no", "make_room", "unload"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and waits; seconds where a name ends in _s.

    Attributes:
        slots: variants that the bank holds.
        max_loads: variants read or staged at a time, which bounds what lies outside the bank.
        load_timeout_s: a load that takes longer counts as failed.
        backoff_s: after a failure, doubled with each further one up to max_backoff_s.
        forget_after_s: a failure that nobody repeated for so long after its back-off is forgotten.
        patience_s: how long a staged variant waits for a slot before one stops giving leases.
        wait_s: how long a holder waits for a place before it is refused as exhausted. The time of
            a running load is load_timeout_s's affair.
    """

    slots: int
    max_loads: int = 2
    load_timeout_s: float = 60.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    forget_after_s: float = 600.0
    patience_s: float = 2.0
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("slots", "max_loads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("load_timeout_s", "backoff_s", "max_backoff_s", "wait_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds above 0")
        for name in ("forget_after_s", "patience_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds, at least 0")


# Where a variant is.


@dataclass(frozen=True, slots=True)
class Absent:
    """Not in memory, and nothing is under way."""


@dataclass(frozen=True, slots=True)
class Queued:
    """To be loaded when one of `max_loads` is free; the lowest turn goes first."""

    turn: int


@dataclass(frozen=True, slots=True)
class Loading:
    """Being read since `since`; `attempt` tells this load from any other."""

    turn: int
    attempt: int
    since: float


@dataclass(frozen=True, slots=True)
class Staged:
    """Read and verified, waiting for a slot since `since`."""

    turn: int
    attempt: int
    since: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Resident:
    """In a slot. While it retires it gives no new leases and leaves after the last."""

    slot: int
    bytes: int
    leases: frozenset[Holder] = frozenset()
    retiring: Retiring = "no"


type Place = Absent | Queued | Loading | Staged | Resident


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The last load's failure; `count` in a row. No new load before `retry_at`."""

    kind: LoadFailureKind
    message: str
    count: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What the table knows of one variant.

    Attributes:
        variant: whose digest is the key.
        place: where it is.
        waiting: holders that wait for it, with the time each began to.
        pinned: never evicted, loaded again when it is absent.
        used: grows with each use in the table; the least is the least recent.
        failure: of the last load, until one succeeds or it is forgotten.
    """

    variant: Variant
    place: Place = Absent()
    waiting: Mapping[Holder, float] = MappingProxyType({})
    pinned: bool = False
    used: int = 0
    failure: LoadFailure | None = None

    @property
    def wanted(self) -> bool:
        """Whether someone waits for it or an operator wants it here."""
        return self.pinned or bool(self.waiting)


# What is to be done, in the order given.


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Read and stage the variant; answer with `loaded` or `failed` and the same attempt."""

    variant: Variant
    attempt: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """Nobody wants this load's answer any more; it may hang."""

    digest: Digest
    attempt: int


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Free what this load staged."""

    digest: Digest
    attempt: int


@dataclass(frozen=True, slots=True)
class WriteSlot:
    """Write what `attempt` staged into the slot, every leaf of it."""

    variant: Variant
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The variant is no longer in the slot; its weights may be kept elsewhere."""

    digest: Digest
    slot: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The holder's variant is in the slot, and leased to the holder until `release`."""

    holder: Holder
    slot: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The holder gets no slot; it holds nothing and is not to be released."""

    holder: Holder
    kind: RefusalKind
    message: str
    retry_after_s: float | None


type Action = StartLoad | AbandonLoad | DropStaged | WriteSlot | Evicted | Grant | Refuse


class PinLimit(ValueError):
    """One more pin would leave no slot for the others."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(
            f"cannot pin {name}: {limit} variants are pinned, which is the most that these slots "
            "allow; unpin another one first"
        )
