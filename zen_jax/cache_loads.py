"""What the delta cache does about loads and host memory: when one begins, when it has taken too
long, whose copy makes room.

Host memory holds copies, in the bank's shapes, of variants that were read from disk: of those in
the bank, of those that left it, and of those that are queued while nothing beside the bank is free.
Copies and what loads may take at most never pass the budget together. A copy that is on its way to
the device, or whose variant somebody waits for, is not dropped.
"""

# pyright: strict

from __future__ import annotations

from zen_jax.cache_draft import Draft
from zen_jax.cache_slots import give_up, reload_pinned
from zen_jax.residency import (
    STAGES,
    Absent,
    Digest,
    DropHost,
    Entry,
    HostCopy,
    Loading,
    Queued,
    Resident,
    Stage,
    Staged,
    StartLoad,
    StartPut,
    Writing,
)

_READS = ("read", "verify")


def host_used(draft: Draft) -> int:
    """Bytes of host memory: copies, and what loads take at most, those given up included."""
    reading = [d for d, place in draft.places(Loading) if place.stage in _READS]
    return (
        sum(copy.bytes for copy in draft.host.values())
        + sum(draft.config.load_bytes(draft.entries[digest].variant) for digest in reading)
        + sum(load.bytes for load in draft.lingering.values())
    )


def fetched(draft: Draft, digest: Digest, place: Loading, size: int) -> None:
    """A variant is in host memory: it goes on to the device in its turn, if somebody wants it or
    there is a free slot."""
    variant = draft.entries[digest].variant
    if size > draft.config.load_bytes(variant):
        draft.actions.append(DropHost(digest))
        message = f"{variant.name} took {size} bytes of host memory, more than was set aside for it"
        draft.fail(digest, "does_not_fit", message)
        return
    draft.host[digest] = HostCopy(variant, size)
    draft.put(digest, Queued(place.turn))


def start_queued(draft: Draft) -> None:
    """Begin loads in the order of their turns, as many as may run."""
    queued = sorted(draft.places(Queued), key=lambda pair: pair[1].turn)
    if not queued:
        return
    places = [entry.place for entry in draft.entries.values()]
    loading = [place.stage for place in places if isinstance(place, Loading)]
    reads = sum(stage in _READS for stage in loading)
    bound = len(loading) - reads
    bound += sum(isinstance(place, Staged | Writing | Resident) for place in places)
    # One that was given up and hangs holds its bytes, and no other's turn.
    puts = len(loading) - reads + sum(isinstance(place, Staged | Writing) for place in places)
    puts += sum(load.stage not in _READS for load in draft.lingering.values())
    room = True
    for digest, place in queued:
        entry, held = draft.entries[digest], digest in draft.host
        if not entry.wanted and not (held and bound < draft.config.slots):
            draft.put(digest, Absent())
        elif held and puts < draft.config.max_staged:
            puts, bound = puts + 1, bound + 1
            loading = Loading(place.turn, draft.turn(), "put", draft.now)
            draft.actions.append(StartPut(entry.variant, loading.attempt))
            draft.put(digest, loading)
        elif held or not room or reads >= draft.config.max_loads:
            continue
        elif (need := draft.config.load_bytes(entry.variant)) > draft.config.host_bytes:
            draft.fail(digest, "does_not_fit", _too_large(entry, need, draft.config.host_bytes))
        elif _make_room(draft, need):
            reads += 1
            loading = Loading(place.turn, draft.turn(), "read", draft.now)
            draft.actions.append(StartLoad(entry.variant, loading.attempt))
            draft.put(digest, loading)
        else:
            room = False  # waited for: else small ones would go first for ever


def _too_large(entry: Entry, need: int, budget: float) -> str:
    return (
        f"{entry.variant.name} takes {need} bytes of host memory while it is loaded; the server's "
        f"budget is {budget:.0f}; serve with more --host-bytes"
    )


def _make_room(draft: Draft, need: int) -> bool:
    """Drop copies until `need` bytes of host memory are free; none if that cannot be."""
    awaited = {digest for digest, _ in draft.places(Queued) if draft.entries[digest].wanted}
    free = draft.config.host_bytes - host_used(draft)
    copies = [d for d in draft.host if d not in awaited and not draft.read_from(d)]
    if free + sum(draft.host[digest].bytes for digest in copies) < need:
        return False
    copies.sort(key=lambda digest: _worth(draft, digest))
    for digest in copies:
        if free >= need:
            break
        free += draft.host.pop(digest).bytes
        draft.actions.append(DropHost(digest))
    return True


def _worth(draft: Draft, digest: Digest) -> tuple[bool, bool, bool, float]:
    """What a copy is worth: nothing while its variant stays in the bank, else as a slot is."""
    entry = draft.entries.get(digest)
    stays = entry is not None and isinstance(entry.place, Resident)
    stays = stays and (digest in draft.kept or (entry is not None and entry.pinned))
    return not stays, *draft.worth(draft.host[digest].variant)


def tick(draft: Draft) -> None:
    """Let time pass: stages that took too long, waits, back-offs."""
    for digest, entry in list(draft.entries.items()):
        match entry.place:
            case Loading(stage=stage, since=since):
                if since + draft.config.deadline_s(stage) <= draft.now:
                    give_up(draft, digest, entry.place)
                    _time_out(draft, digest, entry.place.stage)
            case Writing(since=since):
                if since + draft.config.commit_s <= draft.now:
                    _time_out(draft, digest, "commit")
            case Absent():
                reload_pinned(draft, digest)
            case Queued() | Staged() | Resident():
                _refuse_overdue(draft, digest)


def _time_out(draft: Draft, digest: Digest, stage: Stage) -> None:
    name, limit = draft.entries[digest].variant.name, draft.config.deadline_s(stage)
    message = f"loading {name}: {STAGES[stage]} took longer than {limit:g} s"
    draft.fail(digest, "timed_out", message)


def _refuse_overdue(draft: Draft, digest: Digest) -> None:
    entry, wait_s = draft.entries[digest], draft.config.wait_s
    overdue = [holder for holder, at in entry.waiting.items() if at + wait_s <= draft.now]
    message = f"no slot came free for {entry.variant.name} within {wait_s:g} s"
    draft.refuse(digest, overdue, "exhausted", message, draft.config.patience_s)
