"""A variant's way from its files into the shapes of a bank's slot and onto the devices.

Each step may fail by itself: `server.loader` runs the two here and, as the third,
`zen_jax.engine.Engine.put`. Between them a variant lies in host memory, in the bank's shapes: on an
accelerator in memory that is pinned, from where devices fetch it by themselves.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

import jax

from zen_jax.checkpoint.manifest import Variant
from zen_jax.checkpoint.raw import RawVariant
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema, DeltaBank
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import EMBED
from zen_jax.sharding import Placement
from zen_jax.shares import Key, Piece, Shares

_PINNED = "pinned_host"
# A load beside requests works for so long, then rests for so many times that; no longer in all.
_WORK_S, _RESTS, _RESTED_S = 0.001, 9.0, 2.0


@dataclasses.dataclass(frozen=True)
class ReadVariant:
    """A variant's files in host memory, not all checked yet.

    Attributes:
      raw: the files.
      pieces: what is to be made of them.
      done: those that are in the bank's shapes already.
      rest: how the load makes way for requests.
    """

    raw: RawVariant
    pieces: Sequence[Piece]
    done: dict[Key, WeightDelta]
    rest: "Rest"


@dataclasses.dataclass(frozen=True)
class Staging:
    """How variants of a store come into a bank's slots; may be shared by threads.

    Attributes:
      store: where they are read.
      schema: the bank's shapes.
      placement: the mesh, or None for one device.
      busy: whether requests decode on the processors that a load works on; it then works a tenth
        of the time, until it has rested for 2 s in all.
    """

    store: Store
    schema: BankSchema
    placement: Placement | None = None
    busy: Callable[[], bool] = lambda: False
    places: tuple[int, ...] | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one variant in the bank's shapes, over all devices once."""
        shapes = jax.eval_shape(self.schema.empty)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)) // self.schema.slots

    @functools.cached_property
    def shares(self) -> Shares:
        """How slots are spread over the mesh."""
        return Shares(self.schema, self.placement)

    def read(self, variant: Variant) -> ReadVariant:
        """The files of it that this process's devices need, in host memory; raises as
        `Store.read_files` does.

        What has all its files is checked and brought into shape at once, while the disk is waited
        for; what is wrong with it is left for `verify` to find again, and to tell.
        """
        manifest = self.store.manifest(variant)
        places = self.shares.places if self.places is None else self.places
        pieces = self.shares.pieces(manifest, places)
        left = [len(piece.files) for piece in pieces]
        of_file: dict[str, list[int]] = {}
        for i, piece in enumerate(pieces):
            for file in piece.files:
                of_file.setdefault(file, []).append(i)
        chunks = {f for t in manifest.tensors.values() for p in t.parts.values() for f in p.files()}
        files = [file for file in manifest.files if file in of_file or file not in chunks]
        done: dict[Key, WeightDelta] = {}
        lock = threading.Lock()
        rest = Rest(self.busy)

        def hear(raw: RawVariant, file: str) -> None:
            rest.after_a_while()
            for i in of_file.get(file, ()):
                with lock:
                    left[i] -= 1
                    ready = left[i] == 0
                if ready:
                    with contextlib.suppress(ValueError):
                        raw.check(pieces[i].files)
                        done[pieces[i].key] = self._fit(raw, pieces[i])

        rooms = self.shares.rooms(manifest, pieces)
        raw = self.store.read_files(variant, hear, files, rooms, rest.after_a_while)
        return ReadVariant(raw, pieces, done, rest)

    def _fit(self, raw: RawVariant, piece: Piece) -> WeightDelta:
        deltas = {name: self.store.delta(raw, name, span) for name, span in piece.spans.items()}
        return self.shares.fit(piece, deltas)

    def verify(self, read: ReadVariant) -> DeltaBank:
        """What was read, checked and in the shapes of a slot, as arrays that `Engine.put` takes: in
        host memory, on accelerators pinned, for each device its share.

        Raises:
          VariantCorrupt: a file does not match its checksum; it is named.
          DoesNotFit, ValueError: as `BankSchema.fit` does.
        """
        raw, done = read.raw, read.done
        raw.check()
        tensors = raw.manifest.tensors
        more = tensors[EMBED].shape[0] - self.schema.held.base.vocab_size if EMBED in tensors else 0
        vocab = self.schema.vocabulary(tensors, more)
        for piece in read.pieces:
            if piece.key not in done:
                done[piece.key] = self._fit(raw, piece)
            read.rest.after_a_while()
        slots = self.shares.slots(done, vocab)
        memory = None if jax.default_backend() == "cpu" else _PINNED
        return self.shares.put(slots, memory, read.rest.after_a_while)


class Rest:
    """Has the threads of a load sleep now and then, so that others have their processors."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        """Takes whether somebody needs the processors."""
        self._busy, self._left, self._own = busy, _RESTED_S, threading.local()

    def after_a_while(self) -> None:
        """Sleeps if the thread has worked for long enough, and the load has not rested for long."""
        now = time.thread_time()
        worked = now - self._own.__dict__.setdefault("since", now)
        if worked > _WORK_S:
            pause = min(_RESTS * worked, self._left)
            if pause > 0 and self._busy():
                self._left -= pause
                time.sleep(pause)
            self._own.since = time.thread_time()
