"""A base's store with a pool of adapters in the place of its variants.

A request for an adapter is a request for the member that holds it; several names may be one member,
and so one slot. A member's file stays open as long as anybody holds a `Variant` of it, so that one
that is evicted meanwhile answers its last requests, and its bytes are the disk's again after them.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from zen_jax.checkpoint.manifest import (
    Manifest,
    Variant,
    VariantCorrupt,
    VariantNotFound,
    WrongBase,
)
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema, DeltaBank
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.merge.lora import Adapter
from zen_jax.merge.pool import Pool
from zen_jax.merge.pool_folder import TABLE, PoolDamaged, PoolFolder, parse_member
from zen_jax.merge.pool_memory import pool_bytes, pool_schema
from zen_jax.sharding import Placement
from zen_jax.shares import Key, Shares

_TRIES = 5


class OpenMember:
    """A member's file, open until nobody holds this."""

    def __init__(self, path: Path) -> None:
        """Opens it; raises FileNotFoundError."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, handle)
        self._handle = handle

    def read(self) -> bytes:
        """All of it."""
        size = os.fstat(self._handle).st_size
        return os.pread(self._handle, size, 0)


class PoolStore(Store):
    """A store whose variants are the adapters that a pool answers for; see `Store`."""

    def __init__(self, path: Path, pool: Path, budget: int | None = None):
        """Opens both.

        Args:
          path: the base's store; its own variants are not served.
          pool: the pool's folder.
          budget: bytes of memory for the base and the members; None sets no limit.

        Raises:
          NotAStore, PoolDamaged: one of them is none.
          WrongBase: the pool belongs to another base.
        """
        super().__init__(path)
        self.pool = PoolFolder(pool)
        self._budget = budget
        self._settings, _ = self.pool.read()
        if self._settings.base_digest != self.base().digest:
            raise WrongBase(f"{pool} belongs to another base than {path}; give the store it is of")
        self._lock = threading.Lock()
        self._seen: tuple[tuple[int, int], Pool] | None = None
        self._open: weakref.WeakValueDictionary[str, OpenMember] = weakref.WeakValueDictionary()

    def table(self) -> Pool:
        """The pool's table as it is on disk now."""
        state = os.stat(self.pool.path / TABLE)
        key = (state.st_ino, state.st_mtime_ns)
        with self._lock:
            if self._seen is None or self._seen[0] != key:
                self._seen = key, self.pool.read()[1]
            return self._seen[1]

    def names(self) -> list[str]:
        """Every adapter that is answered for, sorted."""
        return sorted(self.table().names())

    def versions(self, name: str) -> list[int]:
        """One, of an adapter that is answered for."""
        return [1] if name in self.table().names() else []

    def variant(self, name: str, version: int | None = None) -> Variant:
        """The member that answers for an adapter, by the adapter's name.

        Raises:
          VariantNotFound: none does.
          VariantCorrupt: the pool is damaged.
        """
        for _ in range(_TRIES):  # a member may go between the table and its file
            try:
                pool = self.table()
            except (PoolDamaged, OSError) as error:
                raise VariantCorrupt(name, TABLE, str(error)) from error
            if name not in pool.names():
                raise VariantNotFound(f"the pool answers for no {name!r}")
            member = pool.find(name)
            with contextlib.suppress(FileNotFoundError), self._lock:
                held = self._open.get(member.id) or OpenMember(self.pool.member_path(member.id))
                self._open[member.id] = held
                merged = tuple(h.name for h in member.holds)
                return Variant(name, 1, member.id, self.pool.path, 3 * member.bytes, merged, held)
        raise VariantCorrupt(name, "its member", "is missing")

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
        config, rank = self.base().config, self._settings.merger.rank
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
        """A member's bytes, not checked yet."""
        assert isinstance(variant.source, OpenMember)
        return variant, variant.source.read()

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
