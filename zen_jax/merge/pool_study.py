"""Pools compared: the same adapters come in several orders, under several policies and limits.

    python -m zen_jax.merge.pool_study ADAPTERS --base FOLDER --out docs/kmerge.json

Each run is one line of OUT; what is there is not run again. A pool here lies in memory, its bytes
counted as they would be on disk.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zen_jax.merge.combine import linear, ties
from zen_jax.merge.lora import Adapter
from zen_jax.merge.opcm import Opcm
from zen_jax.merge.opcm_lora import Merger
from zen_jax.merge.pool import PoolConfig, coverage
from zen_jax.merge.pool_change import Newcomer, Score, Tasks
from zen_jax.merge.pool_folder import PoolSettings
from zen_jax.merge.pool_scores import scorer
from zen_jax.merge.pool_simulate import budget, orders, read_newcomers, simulate
from zen_jax.training import residual

PLACES, ORDERS, RANK = (3, 5, 8), 3, 8
THRESHOLD, GATE = 0.2, 0.9
POOLS = tuple(
    (policy, operation)
    for policy in ("gated", "kmerge", "kmerge++")
    for operation in ("opcm", "opcm, doc", "mean_delta", "mean_factors")
)
# How each merges.
MERGERS = {
    "opcm": Merger("opcm", RANK),
    "opcm, doc": Merger("opcm", RANK, opcm=Opcm(split="doc")),
    "mean_delta": Merger("mean_delta", RANK),
    "mean_factors": Merger("mean_factors", RANK),
}
BASELINES = ("linear average", "TIES", "drop the oldest")


def _baseline(
    kind: str, order: Sequence[Newcomer], places: int, score: Score, groups: Any
) -> dict[str, float]:
    """M(merged) / M(single) of those that a simpler way answers.

    Args:
      kind: one of `BASELINES`.
      order: who comes.
      places: K.
      score: M.
      groups: for the two that combine at once: who is together, as K-Merge has it.
    """
    by_name = {newcomer.name: newcomer for newcomer in order}
    if kind == "drop the oldest":
        return {newcomer.name: 1.0 for newcomer in order[-places:]}
    ratios: dict[str, float] = {}
    for group in groups:
        adapters = [by_name[name].adapter for name in group]
        made = linear(adapters) if kind == "linear average" else ties(adapters)
        for name in group:
            tasks = Tasks.parse(by_name[name].tasks)
            alone = score(by_name[name].adapter, tasks)
            ratios[name] = score(made, tasks) / alone if alone > 0 else 1.0
    return ratios


def _remembering(score: Score) -> Score:
    """M, remembered for the adapters as they come, which every run asks for again."""
    known: dict[tuple[int, Tasks], float] = {}
    held: list[Adapter] = []

    def remembered(adapter: Adapter, tasks: Tasks) -> float:
        first = next(iter(adapter.values()))
        key = (hash(first.a.tobytes()) ^ hash(first.b.tobytes()), tasks)
        if key not in known:
            known[key] = score(adapter, tasks)
            held.append(adapter)
        return known[key]

    return remembered


def _jobs() -> Iterator[tuple[str, str, int, int]]:
    """(policy or baseline, operation, K, order), the first order of all first."""
    for order, places in itertools.product(range(ORDERS), PLACES):
        for policy, operation in POOLS:
            yield policy, operation, places, order
        for kind in BASELINES:
            yield kind, "", places, order


def run_study(newcomers: Sequence[Newcomer], score: Score, out: Path) -> None:
    """Runs whatever OUT has no line of."""
    lines = out.read_text().splitlines() if out.exists() else []
    done = [json.loads(line) for line in lines]
    seen = {tuple(record["job"]) for record in done}
    by_name = {newcomer.name: newcomer for newcomer in newcomers}
    sequences = orders([n.name for n in newcomers], ORDERS)
    score = _remembering(score)
    for job in _jobs():
        if job in seen:
            continue
        policy, operation, places, index = job
        order = [by_name[name] for name in sequences[index]]
        limit = budget(newcomers, places, RANK)
        record: dict[str, Any] = {"job": job, "places": places, "limit": limit}
        if policy in BASELINES:
            groups = next(
                r["members"] for r in done if r["job"] == ["kmerge", "opcm", places, index]
            )
            ratios = _baseline(policy, order, places, score, groups)
        else:
            config = PoolConfig(places, limit, policy, THRESHOLD, GATE)  # pyright: ignore[reportArgumentType]
            found = simulate(PoolSettings.new(config, MERGERS[operation], ""), order, score)
            ratios = found.ratios
            record |= {
                "members": found.members,
                "used": found.used,
                "peak": found.peak,
                "seconds": round(found.seconds, 1),
                "what": [[c.name, c.what, list(c.together)] for c in found.changes],
            }
        covered = coverage([n.name for n in newcomers], ratios)
        record |= dataclasses.asdict(covered) | {"ratios": ratios}
        done.append(json.loads(json.dumps(record)))
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(job, f"{covered.answered}/{covered.asked} {covered.mean:.3f} {covered.least:.3f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m zen_jax.merge.pool_study")
    parser.add_argument("adapters", type=Path, help="a folder of PEFT folders with tasks.json")
    parser.add_argument("--base", type=Path, required=True, help="their base, a folder")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON, gone on with")
    given = parser.parse_args(arguments)
    try:
        config, base = residual.read_folder(given.base)
        newcomers = read_newcomers(given.adapters, {n: v.shape for n, v in base.items()})
        score = scorer(config, base, RANK)
        run_study(newcomers, score, given.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
