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

from zen_jax.eviction import Policy

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Digest = str
type Holder = int
type LoadFailureKind = Literal["load_failed", "timed_out", "corrupt", "does_not_fit"]
type RefusalKind = Literal[
    "load_failed", "timed_out", "corrupt", "does_not_fit", "exhausted", "withdrawn"
]
type Retiring = Literal["no", "make_room", "unload"]
type Stage = Literal["read", "verify", "put", "commit"]

# What each stage does, in messages.
STAGES: Mapping[Stage, str] = MappingProxyType(
    {"read": "reading", "verify": "checking", "put": "putting on the device", "commit": "writing"}
)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and waits; seconds where a name ends in _s.

    Attributes:
        slots: variants that the bank holds.
        policy: who stays and who goes first.
        max_loads: variants that are read from disk at a time.
        max_staged: variants on their way from host memory into the bank at a time, which bounds
            what lies beside the bank on the device: max_staged x slot_bytes.
        slot_bytes: of one variant in the bank's shapes, which is what a copy in host memory takes.
        host_bytes: for copies in host memory and what loads take there meanwhile, all together.
        read_s: a variant whose files are not read by then counts as failed; likewise
        verify_s: for their checksums,
        put_s: for the way to the device, and
        commit_s: for the writing of its slot.
        backoff_s: after a failure, doubled with each further one up to max_backoff_s.
        forget_after_s: a failure that nobody repeated for so long after its back-off is forgotten.
        patience_s: how long a staged variant waits for a slot before one stops giving leases.
        wait_s: how long a holder waits for a place before it is refused as exhausted. The time of
            a running load is its stages' affair.
    """

    slots: int
    policy: Policy = Policy()
    max_loads: int = 2
    max_staged: int = 2
    slot_bytes: int = 0
    host_bytes: float = inf
    read_s: float = 60.0
    verify_s: float = 30.0
    put_s: float = 30.0
    commit_s: float = 10.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    forget_after_s: float = 600.0
    patience_s: float = 2.0
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("slots", "max_loads", "max_staged"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("slot_bytes", "host_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected bytes, at least 0")
        stages = ("read_s", "verify_s", "put_s", "commit_s")
        for name in (*stages, "backoff_s", "max_backoff_s", "wait_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds above 0")
        for name in ("forget_after_s", "patience_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds, at least 0")

    def deadline_s(self, stage: Stage) -> float:
        """How long a stage may take."""
        stages = {"read": self.read_s, "verify": self.verify_s, "put": self.put_s}
        return stages.get(stage, self.commit_s)

    def load_bytes(self, variant: Variant) -> int:
        """Host memory that reading a variant takes at most: its files, its arrays as they are
        fused, and as they are fitted into the bank's shapes."""
        return variant.bytes + 2 * self.slot_bytes


# Where a variant is.


@dataclass(frozen=True, slots=True)
class Absent:
    """Not in memory, and nothing is under way."""


@dataclass(frozen=True, slots=True)
class Queued:
    """To be brought nearer when there is room; the lowest turn goes first."""

    turn: int


@dataclass(frozen=True, slots=True)
class Loading:
    """On its way: read from disk and checked, or put on the device from its copy in host memory.

    Attributes:
        turn: its place in line.
        attempt: tells this load from any other.
        stage: what is being done, since `since`.
    """

    turn: int
    attempt: int
    stage: Stage
    since: float


@dataclass(frozen=True, slots=True)
class Staged:
    """On the device beside the bank, waiting for a slot since `since`."""

    turn: int
    attempt: int
    since: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Writing:
    """Being written into a slot, which nobody else has; not answered by yet."""

    slot: int
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


type Place = Absent | Queued | Loading | Staged | Writing | Resident


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
        failure: of the last load, until one succeeds or it is forgotten.
    """

    variant: Variant
    place: Place = Absent()
    waiting: Mapping[Holder, float] = MappingProxyType({})
    pinned: bool = False
    failure: LoadFailure | None = None

    @property
    def wanted(self) -> bool:
        """Whether someone waits for it or an operator wants it here."""
        return self.pinned or bool(self.waiting)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A variant in host memory, in the bank's shapes, checked."""

    variant: Variant
    bytes: int


@dataclass(frozen=True, slots=True)
class Lingering:
    """A load that was given up and has not ended yet: it holds memory until it does.

    Attributes:
        digest: whose.
        stage: that it was in.
        bytes: of host memory that it may hold.
    """

    digest: Digest
    stage: Stage
    bytes: int


# What is to be done, in the order given.


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Read the variant into host memory; answer with `fetched` or `failed`, the same attempt."""

    variant: Variant
    attempt: int


@dataclass(frozen=True, slots=True)
class StartPut:
    """Put the copy in host memory on the device; answer with `loaded` or `failed`."""

    variant: Variant
    attempt: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """Nobody wants this load's answer any more; it may hang. Answer with `ended` once it has
    ended and holds nothing any more."""

    digest: Digest
    attempt: int


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Free what this load staged."""

    digest: Digest
    attempt: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """Free the copy in host memory."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class WriteSlot:
    """Write what `attempt` staged into the slot, every leaf of it; answer with `committed` or
    `failed`."""

    variant: Variant
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The variant is no longer in the slot; its copy in host memory, if any, stays."""

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


type Action = (
    StartLoad
    | StartPut
    | AbandonLoad
    | DropStaged
    | DropHost
    | WriteSlot
    | Evicted
    | Grant
    | Refuse
)


class PinLimit(ValueError):
    """One more pin would leave no slot for the others."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(
            f"cannot pin {name}: {limit} variants are pinned, which is the most that these slots "
            "allow; unpin another one first"
        )
