"""What an operator sees of the worker: which variants are where, and how busy the rows are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.jobs import State
from zen_jax.checkpoint.manifest import Variant
from zen_jax.residency import Absent, Entry, Resident, Staged

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


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The worker as of its last tick.

    Attributes:
        variants: those that the table knows; all others are absent.
        slots: that the bank has.
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
    """

    variants: tuple[VariantStatus, ...]
    slots: int
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


def snapshot(
    state: State,
    *,
    waiting: int,
    alive: bool,
    step_s: float,
    host_share: float,
    compiles: int,
) -> WorkerSnapshot:
    """Put together what operators may see of the scheduler's state."""
    return WorkerSnapshot(
        variants=tuple(_status(entry) for entry in state.cache.entries.values()),
        slots=state.cache.config.slots,
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
    )


def _status(entry: Entry) -> VariantStatus:
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
        bytes=place.bytes if isinstance(place, Resident | Staged) else 0,
        failure=None if entry.failure is None else entry.failure.message,
        retry_at=None if entry.failure is None else entry.failure.retry_at,
    )
