"""What the delta cache does with the slots of the bank: who gets one, who leaves, who stays."""

# pyright: strict

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zen_jax.cache_draft import Draft
from zen_jax.residency import (
    AbandonLoad,
    Absent,
    Digest,
    DropHost,
    DropStaged,
    Entry,
    Evicted,
    Lingering,
    Loading,
    Queued,
    Resident,
    Staged,
    WriteSlot,
    Writing,
)

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant


def settle(draft: Draft) -> None:
    """Do with slots what a transition has made possible."""
    _free_unloaded(draft)
    _place_staged(draft)
    _make_room(draft)
    _keep_those_not_needed(draft)


def victim(draft: Draft) -> Digest | None:
    """Who leaves next, of those that nobody holds and that are neither pinned nor kept: first who
    retires, then by what a place is worth to it, see `zen_jax.eviction`."""
    draft.choose_kept()
    free = {
        digest: place
        for digest, place in draft.residents().items()
        if not place.leases and not draft.entries[digest].pinned and digest not in draft.kept
    }

    def worth(digest: Digest) -> tuple[bool, bool, bool, float, int]:
        place = free[digest]
        return place.retiring == "no", *draft.worth(draft.entries[digest].variant), place.slot

    return min(free, key=worth, default=None)


def evict(draft: Draft, digest: Digest) -> None:
    """Free a slot; who waits for its variant waits for a load anew."""
    entry = draft.entries[digest]
    if not isinstance(entry.place, Resident) or entry.place.leases:
        raise RuntimeError(f"{digest} is leased or not resident and cannot be evicted")
    draft.actions.append(Evicted(digest, entry.place.slot))
    draft.put(digest, Absent())
    if entry.waiting:
        draft.queue(digest)


def committed(draft: Draft, digest: Digest, place: Writing) -> None:
    """A slot is written: its variant answers from now on."""
    variant = draft.entries[digest].variant
    draft.put(digest, Resident(place.slot, place.bytes))
    for other in _pinned_by_name(draft, variant):  # a pin is meant for a name
        if draft.entries[other].variant.version <= variant.version:
            draft.entries[other] = replace(draft.entries[other], pinned=False)
            draft.entries[digest] = replace(draft.entries[digest], pinned=True)
    draft.grant(digest)
    draft.choose_kept()


def pin(draft: Draft, variant: Variant) -> None:
    """Keep a variant, and no other version of it."""
    digest = variant.digest
    for other in _pinned_by_name(draft, variant):
        draft.entries[other] = replace(draft.entries[other], pinned=False)
    entry = replace(draft.entries.get(digest, Entry(variant)), pinned=True)
    draft.entries[digest] = entry
    if isinstance(entry.place, Resident):
        draft.put(digest, replace(entry.place, retiring="no"))
        draft.grant(digest)
    reload_pinned(draft, digest)
    draft.choose_kept()


def reload_pinned(draft: Draft, digest: Digest) -> None:
    """Queue a pinned variant that is absent and whose back-off is over."""
    entry = draft.entries[digest]
    ready = entry.failure is None or entry.failure.retry_at <= draft.now
    if entry.pinned and ready and isinstance(entry.place, Absent):
        draft.queue(digest)


def unload(draft: Draft, digest: Digest) -> None:
    """Take a variant out of memory; what it is leased to runs to its end first."""
    if digest in draft.host and not draft.read_from(digest):
        del draft.host[digest]
        draft.actions.append(DropHost(digest))
    if digest not in draft.entries:
        return
    entry = replace(draft.entries[digest], pinned=False)
    draft.entries[digest] = entry
    match entry.place:
        case Resident():
            draft.put(digest, replace(entry.place, retiring="unload"))
            return
        case Loading():
            give_up(draft, digest, entry.place)
        case Staged(attempt=attempt):
            draft.actions.append(DropStaged(digest, attempt))
        case Writing() | Queued() | Absent():
            pass
    draft.put(digest, Absent())
    message = f"{entry.variant.name} was unloaded by an operator before it was in memory"
    draft.refuse(digest, entry.waiting, "withdrawn", message, None)


def give_up(draft: Draft, digest: Digest, place: Loading) -> None:
    """Want a load no more; what it holds is counted until it has ended."""
    draft.actions.append(AbandonLoad(digest, place.attempt))
    reads = place.stage in ("read", "verify")
    size = draft.config.load_bytes(draft.entries[digest].variant) if reads else 0
    draft.lingering[place.attempt] = Lingering(digest, place.stage, size)


def _pinned_by_name(draft: Draft, variant: Variant) -> list[Digest]:
    pinned = [(digest, entry.variant) for digest, entry in draft.entries.items() if entry.pinned]
    return [digest for digest, other in pinned if other.name == variant.name]


def _free_slot(draft: Draft, *, wanted: bool) -> int | None:
    """A slot to write: a free one, else, for one that is wanted, the victim's, who is evicted."""

    def taken() -> set[int]:
        places = (entry.place for entry in draft.entries.values())
        return {place.slot for place in places if isinstance(place, Resident | Writing)}

    if len(taken()) == draft.config.slots:
        leaves = victim(draft) if wanted else None
        if leaves is None:
            return None
        evict(draft, leaves)
    return min(set(range(draft.config.slots)) - taken())


def _staged(draft: Draft) -> list[tuple[Digest, Staged]]:
    return sorted(draft.places(Staged), key=lambda pair: pair[1].turn)


def _free_unloaded(draft: Draft) -> None:
    for digest, place in draft.residents().items():
        if place.retiring == "unload" and not place.leases:
            evict(draft, digest)


def _place_staged(draft: Draft) -> None:
    for digest, staged in _staged(draft):
        entry = draft.entries[digest]
        slot = _free_slot(draft, wanted=entry.wanted)
        if slot is not None:
            draft.actions.append(WriteSlot(entry.variant, slot, staged.attempt))
            draft.put(digest, Writing(slot, staged.attempt, draft.now, staged.bytes))
        elif not entry.wanted:
            draft.actions.append(DropStaged(digest, staged.attempt))
            draft.put(digest, Absent())


def _make_room(draft: Draft) -> None:
    """Retire one slot for each staged variant whose patience is over."""
    patience = draft.config.patience_s
    needed = sum(place.since + patience <= draft.now for _, place in _staged(draft))
    if not needed:
        return
    draft.choose_kept()
    residents = draft.residents()
    needed -= sum(place.retiring != "no" for place in residents.values())
    candidates = [
        digest
        for digest, place in residents.items()
        if place.retiring == "no" and not draft.entries[digest].pinned and digest not in draft.kept
    ]
    candidates.sort(key=lambda digest: draft.worth(draft.entries[digest].variant))
    for digest in candidates[: max(needed, 0)]:
        draft.put(digest, replace(residents[digest], retiring="make_room"))


def _keep_those_not_needed(draft: Draft) -> None:
    """Who retires to make room for no one any more gives leases again."""
    needed = len(_staged(draft))
    for digest, place in draft.residents().items():
        if place.retiring != "make_room":
            continue
        needed -= 1
        if needed < 0:
            draft.put(digest, replace(place, retiring="no"))
            draft.grant(digest)
