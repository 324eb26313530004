"""A base's store with a pool of adapters in the place of its variants.

A request for an adapter is a request for the member that holds it; several names may be one member,
and so one slot. Each request has a lease on its member, by the pool's own transitions, and as long
as there is one its file is locked: one that is evicted meanwhile, also by another process, counts
in the pool's bytes until its last request has ended, and is deleted then.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

from zen_jax.adapter_folder import AdapterFolder
from zen_jax.checkpoint.manifest import (
    Manifest,
    Variant,
    VariantCorrupt,
    VariantNotFound,
    WrongBase,
)
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema, DeltaBank, DoesNotFit
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.merge.lora import Adapter
from zen_jax.merge.pool import Member, MemberGone, NotInPool, Pool
from zen_jax.merge.pool_change import Change, Score
from zen_jax.merge.pool_folder import (
    TABLE,
    OpenMember,
    PoolBusy,
    PoolDamaged,
    PoolFolder,
    parse_member,
)
from zen_jax.merge.pool_memory import pool_bytes, pool_schema
from zen_jax.sharding import Placement
from zen_jax.shares import Key, Shares

_log = logging.getLogger(__name__)

_TRIES = 5
# For a process that changes the pool, in seconds: an addition takes seconds.
_BUSY_S = 60.0


class NotTakenIn(Exception):
    """An adapter that may be asked for, and is in no member yet.

    Attributes:
        name: the adapter.
        mark: of it and the pool as they are, see `PoolStore.mark`.
    """

    def __init__(self, name: str, mark: str) -> None:
        super().__init__(f"{name} has to be taken into the pool first")
        self.name, self.mark = name, mark


class PoolStore(Store):
    """A store whose variants are the adapters that a pool answers for; see `Store`."""

    def __init__(
        self, path: Path, pool: Path, budget: int | None = None, adapters: Path | None = None
    ):
        """Opens both.

        Args:
          path: the base's store; its own variants are not served.
          pool: the pool's folder.
          budget: bytes of memory for the base and the members; None sets no limit.
          adapters: a folder of adapters that are taken into the pool when they are asked for.

        Raises:
          NotAStore, PoolDamaged: one of them is none.
          WrongBase: the pool belongs to another base.
          ValueError: `adapters` is no folder.
        """
        super().__init__(path)
        self.adapters = None if adapters is None else AdapterFolder(adapters)
        self.pool = PoolFolder(pool)
        self._budget = budget
        self._settings, _ = self.pool.read()
        if self._settings.base_digest != self.base().digest:
            raise WrongBase(f"{pool} belongs to another base than {path}; give the store it is of")
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._pool = Pool(self._settings.config)
        self._files: dict[str, OpenMember] = {}

    @property
    def rank(self) -> int:
        """Of a member at most, where it is merged."""
        return self._settings.merger.rank

    def table(self) -> Pool:
        """The pool's table as it is on disk now, with the leases that are held here."""
        with self._lock:
            return self._table()

    def _table(self) -> Pool:
        """With the lock held."""
        state = os.stat(self.pool.path / TABLE)
        key = (state.st_ino, state.st_mtime_ns)
        if self._seen != key:
            self._pool, self._seen = self._pool.seen(self.pool.read()[1]), key
        return self._pool

    def names(self) -> list[str]:
        """Every adapter that may be asked for, sorted; of a damaged pool none."""
        found = set[str]() if self.adapters is None else set(self.adapters.names())
        with contextlib.suppress(PoolDamaged, OSError):
            found |= set(self.table().names())
        return sorted(found)

    def versions(self, name: str) -> list[int]:
        """One, of an adapter that is answered for."""
        return [1] if name in self.table().names() else []

    def variant(self, name: str, version: int | None = None) -> Variant:
        """The member that answers for an adapter, by the adapter's name.

        One that is to be taken in first has neither bytes nor a digest yet. Whoever is to be
        answered needs a lease as well, see `leased`.

        Raises:
          VariantNotFound: none does.
          VariantCorrupt: the pool is damaged.
        """
        try:
            return self._variant(name, self.table().find(name))
        except NotInPool:
            if self.adapters is not None and self.adapters.holds(name):
                return Variant(name, 1, "", self.adapters.path / name)
            raise VariantNotFound(f"the pool answers for no {name!r}") from None
        except (PoolDamaged, OSError) as error:
            raise VariantCorrupt(name, TABLE, str(error)) from error

    def leased(self, name: str) -> tuple[Variant, Callable[[], None]]:
        """As `variant`, and what ends the lease that comes with it; to be called once.

        Raises:
          NotTakenIn: it is in no member yet, and can be taken in.
          VariantNotFound, VariantCorrupt: as `variant`.
        """
        for _ in range(_TRIES):  # a member may go between the table and its file
            variant = self.variant(name)
            if not variant.digest:
                raise NotTakenIn(name, self.mark(name))
            with contextlib.suppress(MemberGone):
                self._lease(variant.digest)
                return variant, partial(self._release, variant.digest)
        raise VariantCorrupt(name, "its member", "is missing")

    def _variant(self, name: str, member: Member) -> Variant:
        merged = tuple(held.name for held in member.holds)
        return Variant(name, 1, member.id, self.pool.path, 3 * member.bytes, merged)

    # ---- leases

    def _lease(self, id: str) -> OpenMember:
        """Raises MemberGone."""
        with self._lock:
            pool, _ = self._table().lease(id)
            try:
                file = self._files.get(id) or OpenMember(self.pool.member_path(id))
            except FileNotFoundError:
                raise MemberGone(f"{id} was evicted meanwhile") from None
            self._pool, self._files[id] = pool, file
            return file

    def _release(self, id: str) -> None:
        with self._lock:
            self._pool, _ = self._pool.release(id)
            member = self._pool.members.get(id) or self._pool.leaving.get(id)
            if member is not None and member.leases:
                return
            # Closed before one looks: whoever evicts it later finds it free to be deleted.
            self._files.pop(id).close()
            with contextlib.suppress(PoolDamaged, OSError):
                self._table()
            if id in self._pool.members:
                return
        # Another process may have the pool's lock for seconds.
        threading.Thread(target=self._sweep, name="zen-pool-sweep", daemon=True).start()

    def _sweep(self) -> None:
        try:
            self.pool.sweep(_BUSY_S)
        except (PoolBusy, PoolDamaged, OSError) as error:
            _log.warning("what the pool has evicted is deleted with its next change: %s", error)

    # ---- what comes in

    def mark(self, name: str) -> str:
        """Of an adapter's files and the pool's table: once it is another, what was refused is
        worth another try."""
        assert self.adapters is not None
        self.table()
        return f"{self._seen} {self.adapters.mark(name)}"

    def take_in(self, name: str, score: Score) -> Change:
        """Takes an adapter of the folder into the pool.

        Raises:
          AdapterUnusable: it is no adapter that could be.
          DoesNotFit: kept as it is, it would have no room in the bank.
          PoolRefusal: there is no place for it.
          PoolBusy: another process changes the pool, for longer than is waited.
          PoolDamaged: it is.
          ValueError: it does not fit the members, or its tasks the base.
        """
        assert self.adapters is not None
        shapes = {name: entry.shape for name, entry in self.base().tensors.items()}
        newcomer = self.adapters.read(name, shapes, self._settings.config.bytes)
        rank = max(factors.rank for factors in newcomer.adapter.values())
        if rank > self.rank:
            raise DoesNotFit(f"{name} has rank {rank}; the pool's members have at most {self.rank}")
        return self.pool.add(newcomer, score, _BUSY_S)

    def manifest(self, variant: Variant) -> Manifest:
        """The base's: a member has its vocabulary, and no manifest of its own."""
        return self.base()

    def tokenizer_folder(self, variant: Variant | None) -> Path:
        """The base's."""
        return super().tokenizer_folder(None)

    # ---- into the bank

    def schema(self, slots: int | None = None) -> BankSchema:
        """A bank with room for the pool's members and for nothing else.

        Args:
          slots: M; None takes as many as the pool may have members and the budget holds.

        Raises:
          ValueError: the budget does not hold the base and one member, or so many slots.
        """
        config, rank = self.base().config, self.rank
        most = slots or self._settings.config.adapters
        schema = pool_schema(config, most, rank)
        if self._budget is None:
            return schema
        whole, each = pool_bytes(config, rank)
        fits = (self._budget - whole) // each
        if fits < (slots or 1):
            raise ValueError(
                f"a budget of {self._budget} bytes is too small: the base takes {whole}, each of "
                f"{slots or 1} members {each}"
            )
        return pool_schema(config, min(most, fits), rank)

    def read_member(self, variant: Variant) -> tuple[Variant, bytes]:
        """A member's bytes, not checked yet.

        Raises:
          VariantCorrupt: it has gone, since nobody who has a lease wants it.
        """
        with self._using(variant) as file:
            return variant, file.read()

    @contextlib.contextmanager
    def _using(self, variant: Variant) -> Iterator[OpenMember]:
        try:
            file = self._lease(variant.digest)
        except MemberGone as error:
            raise VariantCorrupt(str(variant), "its member", "was evicted") from error
        try:
            yield file
        finally:
            self._release(variant.digest)

    def stage(
        self, schema: BankSchema, placement: Placement | None
    ) -> Callable[[tuple[Variant, bytes]], DeltaBank]:
        """A function from a member's bytes to a slot of the bank, checked.

        It raises VariantCorrupt where the bytes are damaged, DoesNotFit where the bank has no room.
        """
        shares = Shares(schema, placement)

        def staged(read: tuple[Variant, bytes]) -> DeltaBank:
            variant, data = read
            try:
                adapter = parse_member(data, variant.digest).adapter
            except PoolDamaged as error:
                raise VariantCorrupt(str(variant), "its member", str(error)) from error
            tensors = _deltas(self.base(), adapter)
            done: dict[Key, WeightDelta] = {}

            def fit(spec: ParamSpec) -> None:
                done[spec.sources, None] = schema.fit_weight(spec, tensors)

            map_specs(fit, schema.held.config)
            vocab = np.int32(schema.held.base.vocab_size)
            # What is spread over a mesh is cut from the whole: members are small.
            memory = None if jax.default_backend() == "cpu" else "pinned_host"
            return shares.put(shares.slots(done, vocab), memory)

        return staged


def _deltas(base: Manifest, adapter: Adapter) -> dict[str, WeightDelta]:
    return {
        name: WeightDelta(low_rank=(adapter[name].a, adapter[name].b))
        if name in adapter
        else WeightDelta()
        for name in base.tensors
    }
