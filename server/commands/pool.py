"""`zen pool`: adapters are taken into a pool, and what it holds is shown."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.checkpoint.store import Store
from zen_jax.merge.opcm import Opcm
from zen_jax.merge.opcm_lora import Merger
from zen_jax.merge.pool import PoolConfig, coverage
from zen_jax.merge.pool_change import Change, Newcomer, Score
from zen_jax.merge.pool_folder import TABLE, PoolFolder, PoolSettings
from zen_jax.merge.pool_scores import scorer
from zen_jax.merge.pool_simulate import budget, orders, read_newcomer, read_newcomers
from zen_jax.merge.pool_simulate import simulate as run_simulation

_PLACES = 8
# For a process that changes the pool: a server that deletes what was evicted, or takes one in.
_BUSY_S = 10.0


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a user said of a pool; None where nothing."""

    adapters: int | None = None
    budget_bytes: int | None = None
    policy: str | None = None
    operation: str | None = None
    split: str | None = None
    rank: int | None = None
    gate: float | None = None
    threshold: float | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{n.replace('_', '-')}" for n, v in vars(self).items() if v is not None]

    def settings(self, newcomer: Newcomer, limit: int, base_digest: str) -> PoolSettings:
        """For a new pool; `newcomer` says the rank where nobody does.

        Raises:
          ValueError: a value cannot be.
        """
        said = {"policy": self.policy, "gate": self.gate, "threshold": self.threshold}
        rules: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        config = PoolConfig(self.adapters or _PLACES, limit, **rules)
        rank = self.rank or max(factors.rank for factors in newcomer.adapter.values())
        operation: Any = self.operation or "opcm"
        split: Any = self.split or "code"
        if self.split is not None and operation != "opcm":
            raise ValueError(f"--split is for opcm; the operation is {operation}")
        merger = Merger(operation, rank, opcm=Opcm(split=split))
        return PoolSettings.new(config, merger, base_digest)


def add(
    path: Path, adapter: Path, store: Path, name: str | None, choices: Choices, *, as_json: bool
) -> None:
    """Takes an adapter into a pool, which is made if there is none."""
    base = Store(store)
    newcomer = read_newcomer(adapter, _shapes(base), name or "")
    folder = PoolFolder(path)
    digest = base.base().digest
    if not (path / TABLE).exists():
        if choices.budget_bytes is None:
            raise ValueError(f"{path} is no pool yet; give --budget-bytes to make one")
        settings = choices.settings(newcomer, choices.budget_bytes, digest)
        folder = PoolFolder.create(path, settings)
    elif choices.given:
        raise ValueError(f"{path} has its limits and rules; leave out {', '.join(choices.given)}")
    settings, _ = folder.read()
    if settings.base_digest != digest:
        raise ValueError(
            f"{path} belongs to another base ({settings.base_digest[:12]}) than {store} "
            f"({digest[:12]})"
        )
    change = folder.add(newcomer, _scorer(base, settings.merger.rank), _BUSY_S)
    if as_json:
        console.print_json(dataclasses.asdict(change))
        return
    console.say(_told(change))


def ls(path: Path, *, as_json: bool) -> None:
    """Lists a pool's members."""
    settings, pool = PoolFolder(path).read()
    config, merger = settings.config, settings.merger
    rows = [
        {"member": m.id, "bytes": m.bytes, "answers for": [held.name for held in m.holds]}
        for m in pool.members.values()
    ]
    if as_json:
        how = {"operation": merger.operation, "rank": merger.rank, "split": merger.opcm.split}
        limits = dataclasses.asdict(config) | how
        leaving = [{"member": m.id, "bytes": m.bytes} for m in pool.leaving.values()]
        figures = {"limits": limits, "used": pool.used, "members": rows, "leaving": leaving}
        console.print_json(figures)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("member")
    table.add_column("bytes", justify="right")
    table.add_column("answers for")
    for row in rows:
        table.add_row(row["member"][:12], f"{row['bytes']:,}", ", ".join(row["answers for"]))
    console.stdout().print(table)
    gone = len(pool.leaving)
    evicted = f" ({gone} evicted that still answer among them)" if gone else ""
    console.say(
        f"{len(rows)} of {config.adapters} members, {pool.used:,} of {config.bytes:,} bytes"
        f"{evicted}; {config.policy}, {merger.operation} to rank {merger.rank}"
    )


def show(path: Path, name: str, *, as_json: bool) -> None:
    """Says which member answers for an adapter."""
    folder = PoolFolder(path)
    _, pool = folder.read()
    member = pool.find(name)
    (held,) = [h for h in member.holds if h.name == name]
    figures = {
        "name": name,
        "member": member.id,
        "bytes": member.bytes,
        "together with": [h.name for h in member.holds if h.name != name],
        "merged": folder.load(member.id).count,
        "scored alone": dict(held.scores),
        "digest": held.digest,
    }
    if as_json:
        console.print_json(figures)
        return
    for key, value in figures.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        console.say(f"{key}: {text or 'nobody'}")


def simulate(adapters: Path, store: Path, order: int, choices: Choices, *, as_json: bool) -> None:
    """Has all adapters of a folder come to a pool in memory."""
    base = Store(store)
    newcomers = read_newcomers(adapters, _shapes(base))
    most = max(newcomers, key=lambda n: max(f.rank for f in n.adapter.values()))
    rank = choices.settings(most, 2**62, "").merger.rank
    limit = choices.budget_bytes or budget(newcomers, choices.adapters or _PLACES, rank)
    settings = choices.settings(most, limit, base.base().digest)
    by_name = {newcomer.name: newcomer for newcomer in newcomers}
    names = orders(list(by_name), order + 1)[order]
    with console.progress_bar("pool") as report:
        done = 0

        def hear(change: Change) -> None:
            nonlocal done
            done += 1
            report(change.name, done, len(names))

        found = run_simulation(
            settings, [by_name[name] for name in names], _scorer(base, rank), hear
        )
    covered = coverage(names, found.ratios)
    if as_json:
        console.print_json(dataclasses.asdict(found) | {"coverage": dataclasses.asdict(covered)})
        return
    for change in found.changes:
        console.say(_told(change))
    console.say(
        f"{covered.answered} of {covered.asked} are answered by {len(found.members)} members, with "
        f"{covered.mean:.3f} of their scores on average of all and {covered.least:.3f} at least; "
        f"{found.peak:,} bytes at most of {limit:,}, {found.seconds:.1f} s of processor"
    )


def _told(change: Change) -> str:
    failed = "".join(f", not with {id[:12]} ({ratio:.2f})" for id, ratio in change.tried)
    if change.what == "refused":
        return change.why
    if change.what == "there":
        return f"{change.name} is there already, in {change.member[:12]}"
    if change.what == "kept":
        return f"{change.name} is kept as {change.member[:12]}{failed}; {change.seconds:.1f} s"
    least = min(change.ratios.values())
    return (
        f"{change.name} is merged with {', '.join(change.together)} (similarity "
        f"{change.similarity:.3f}) as {change.member[:12]}{failed}; the least that a task keeps is "
        f"{least:.2f}; {change.seconds:.1f} s"
    )


def _shapes(store: Store) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in store.base().tensors.items()}


def _scorer(store: Store, rank: int) -> Score:
    tensors: dict[str, np.ndarray] = dict(store.base_tensors())
    return scorer(store.base().config, tensors, rank)
