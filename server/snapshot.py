"""What an operator sees of the worker: which variants are where, and how busy the rows are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.jobs import State
from zen_jax.checkpoint.manifest import Variant
from zen_jax.delta_cache import DeltaCache
from zen_jax.residency import Absent, Entry, Resident, Staged, Writing

type VariantState = Literal["resident", "loading", "absent", "failed"]


@dataclass(frozen=True, slots=True)
class VariantStatus:
    """One variant in the table.

    Attributes:
        variant: whose.
        state: "loading" from when it is queued to be read until it has a slot; "failed" while its
            last load's failure is remembered.
        slot: where it is, or None.
        pinned: whether it is kept.
        leases: requests that use it, those that wait for a row included.
        waiting: requests that wait for it to be loaded.
        bytes: on the device, in its slot or staged for one.
        failure: of the last load, fit for clients, or None.
        retry_at: no load before it, in seconds of the worker's clock; None without a failure.
        kept: whether it is one of the most asked for, who stay.
        rate: requests a second, of late.
        host_bytes: of its copy in host memory.
    """

    variant: Variant
    state: VariantState
    slot: int | None
    pinned: bool
    leases: int
    waiting: int
    bytes: int
    failure: str | None
    retry_at: float | None
    kept: bool = False
    rate: float = 0.0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The worker as of its last tick.

    Attributes:
        variants: those that the table knows; all others are absent.
        slots: that the bank has.
        host_used: bytes of host memory, of copies and of what loads take at most.
        host_budget: for both; infinite if there is no bound.
        loads: variants whose reading was begun.
        rows: that the engine has.
        rows_in_use: by requests that run.
        waiting: requests accepted that have no row yet.
        alive: whether the worker serves.
        step_s: what a decode step takes, in seconds; without end until one was made.
        host_share: of a round of the worker, what it does not wait for the device.
        compiles: programs that were compiled, at the start or since.
        pages: of the cache.
        pages_held: by rows.
        pages_kept: by nobody, for prompts that begin as one before them did.
        found_tokens: that were not read, since their pages were there; since the start.
        read_tokens: of prompts, and of answers after a row was lost; since the start.
        rows_lost: how often a request lost its row to another; since the start.
        evictions: slots that variants have left; since the start.
    """

    variants: tuple[VariantStatus, ...]
    slots: int
    host_used: int
    host_budget: float
    loads: int
    rows: int
    rows_in_use: int
    waiting: int
    alive: bool
    step_s: float
    host_share: float
    compiles: int
    pages: int = 0
    pages_held: int = 0
    pages_kept: int = 0
    found_tokens: int = 0
    read_tokens: int = 0
    rows_lost: int = 0
    evictions: int = 0


def snapshot(
    state: State,
    *,
    waiting: int,
    alive: bool,
    step_s: float,
    host_share: float,
    compiles: int,
    loads: int,
    evictions: int,
    now: float,
) -> WorkerSnapshot:
    """Put together what operators may see of the scheduler's state."""
    return WorkerSnapshot(
        variants=_statuses(state.cache, now),
        slots=state.cache.config.slots,
        host_used=state.cache.host_used,
        host_budget=state.cache.config.host_bytes,
        loads=loads,
        rows=len(state.rows),
        rows_in_use=state.running,
        waiting=waiting,
        alive=alive,
        step_s=step_s,
        host_share=host_share,
        compiles=compiles,
        pages=state.pages.size,
        pages_held=state.pages.held,
        pages_kept=state.pages.idle,
        found_tokens=state.found_tokens,
        read_tokens=state.read_tokens,
        rows_lost=state.lost,
        evictions=evictions,
    )


def _statuses(cache: DeltaCache, now: float) -> tuple[VariantStatus, ...]:
    """Of all that are on the device, on their way to it, remembered, or in host memory."""
    known = dict(cache.entries)
    for digest, copy in cache.host.items():
        known.setdefault(digest, Entry(copy.variant))
    return tuple(_status(cache, digest, entry, now) for digest, entry in known.items())


def _status(cache: DeltaCache, digest: str, entry: Entry, now: float) -> VariantStatus:
    place = entry.place
    resident = place if isinstance(place, Resident) else None
    if resident is not None:
        state: VariantState = "resident"
    elif not isinstance(place, Absent):
        state = "loading"
    else:
        state = "absent" if entry.failure is None else "failed"
    return VariantStatus(
        variant=entry.variant,
        state=state,
        slot=None if resident is None else resident.slot,
        pinned=entry.pinned,
        leases=0 if resident is None else len(resident.leases),
        waiting=len(entry.waiting),
        kept=digest in cache.kept,
        rate=cache.rate(entry.variant, now),
        bytes=place.bytes if isinstance(place, Resident | Staged | Writing) else 0,
        host_bytes=cache.host[digest].bytes if digest in cache.host else 0,
        failure=None if entry.failure is None else entry.failure.message,
        retry_at=None if entry.failure is None else entry.failure.retry_at,
    )
