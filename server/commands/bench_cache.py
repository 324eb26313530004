"""`zen bench cache`: hit rates as a table, as JSON, and as a page with a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax import benchmark_cache as bench
from zen_jax.eviction import Policy

_TITLES = ("traffic", "variants", "slots", "hit rate", "LRU", "LFU", "best online", "Belady")
_MORE = ("of the best", "hot six reloaded")
_LOADS = "\n## What a load takes\n"


def run(requests: int, policy: Policy, out: Path | None, docs: Path | None) -> None:
    """Simulates, prints a table, and writes what was asked for.

    Args:
      requests: of each case.
      policy: of the delta cache.
      out: a file for the figures as JSON.
      docs: a folder for cache.md and cache.png.

    Raises:
      ValueError: a number is out of range, or there is nothing to draw with.
      OSError: a file cannot be written.
    """
    if docs is not None and not docs.is_dir():
        raise ValueError(f"--docs is {docs}; expected a folder")
    for path in (out, docs and docs / "cache.md"):
        if path is not None:
            path.touch()  # before a minute is spent
    with console.progress_bar("bench") as report:
        cases = bench.bench_cache(requests, policy, progress=report)
        if docs is not None:
            draw(cases, docs / "cache.png")
            target = docs / "cache.md"
            target.write_text(page(cases, requests, policy) + loads_section(target.read_text()))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in (*_TITLES, *_MORE):
        table.add_column(title, justify="left" if title == "traffic" else "right")
    for case in cases:
        table.add_row(*_row(case))
    console.stdout().print(table)
    if out is not None:
        out.write_text(json.dumps({"cases": [case.figures() for case in cases]}, indent=2) + "\n")


def _row(case: bench.CacheCase) -> list[str]:
    rates = (case.hit_rate, case.lru, case.lfu)
    return [
        case.traffic,
        str(case.variants),
        str(case.slots),
        *(f"{rate:.3f}" for rate in rates),
        f"{case.best_online:.3f} {case.rival}",
        f"{case.belady:.3f}",
        f"{case.hit_rate / case.best_online:.3f}",
        "" if case.hot_reloads is None else str(case.hot_reloads),
    ]


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(cases: Sequence[bench.CacheCase], requests: int, policy: Policy) -> str:
    """docs/cache.md: the policy, and what was measured of it."""
    worst = min(case.hit_rate / case.best_online for case in cases)
    over_lru = min(case.hit_rate - case.lru for case in cases)
    reloads = sum(case.hot_reloads or 0 for case in cases)
    waits = [
        [w.policy, f"{w.p50:.2f}", f"{w.p99:.2f}", f"{w.longest:.2f}", str(w.loads), str(w.refused)]
        for w in bench.all_waits(policy)
    ]
    sweep = [
        [f"{half:g}", f"{shift:g}", f"{ratio:.3f}"]
        for half, shift, ratio in bench.sensitivity(requests=requests)
    ]
    return _PAGE.format(
        requests=requests,
        rate=bench.RATE,
        shift=bench.SHIFT_S,
        policy=policy,
        worst=worst,
        over_lru=over_lru,
        reloads=reloads,
        cases=_markdown((*_TITLES, *_MORE), [_row(case) for case in cases]),
        waits=_markdown(("policy", "p50 s", "p99 s", "longest s", "loads", "refused"), waits),
        sweep=_markdown(("half-life s", "shift every s", "of the best online"), sweep),
    )


def loads_section(before: str) -> str:
    """What a page says of loads, which `zen bench coldstart` measures; it is kept as it is."""
    at = before.find(_LOADS)
    return "" if at < 0 else before[at:]


def draw(cases: Sequence[bench.CacheCase], path: Path) -> None:
    """The same as bars.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--docs draws with matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys((case.slots, case.variants) for case in cases))
    figure, axes = plt.subplots(len(sizes), 1, figsize=(9, 3 * len(sizes)), squeeze=False)
    for axis, size in zip(axes[:, 0], sizes, strict=True):
        shown = [case for case in cases if (case.slots, case.variants) == size]
        columns = {
            "LRU": [case.lru for case in shown],
            "LFU": [case.lfu for case in shown],
            "best online": [case.best_online for case in shown],
            "delta cache": [case.hit_rate for case in shown],
            "Belady": [case.belady for case in shown],
        }
        for i, (name, rates) in enumerate(columns.items()):
            places = [at + 0.16 * (i - 2) for at in range(len(shown))]
            axis.bar(places, rates, 0.16, label=name)
        axis.set_xticks(range(len(shown)), [case.traffic for case in shown], fontsize=7)
        axis.set_ylim(0.3 if size[1] > 50 else 0.6, 1.0)
        axis.set_ylabel("hit rate")
        axis.set_title(f"{size[1]} variants, {size[0]} slots", fontsize=9)
    axes[0, 0].legend(ncols=5, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


_PAGE = """# Which variants are in memory

Written by `zen bench cache --docs docs`.

## Who stays and who goes

A request for a variant at time t counts 2^-((now - t) / h) at `now`; h is the half-life (`zen
serve --half-life`). The sum over its requests is its weight; weight x ln 2 / h is its rate in
requests a second. A new version of a name takes its weight over, and the old one is the next to
go.

- **Kept**: the `--pinned` most asked for of those in memory (here {policy.pinned}; at most all
  slots but one, less the operators' pins) are never evicted. One takes another's place among them
  only when it is ahead by more than chance: weight(new) - weight(old) > {policy.hysteresis:g}
  sqrt((weight(new) + weight(old)) / 2), since a decayed count of independent requests has half
  its mean as variance.
- **Victim**: of the others that no request holds, the one with the least rate x recency,

      score = log2(weight) - (now - last use) / r

  with r = h. The last use is the last request or the end of the last lease. Limits: r -> 0 is
  plain LRU; r and h -> infinity is plain LFU; r -> infinity alone is LRFU, that is LFU with
  ageing.
- **Cold**: who was not used for `--idle-after` ({policy.idle_after_s:g} s) is not kept and goes
  first.
- **No thrash**: a slot is never written while a request holds it, and all who wait for a variant
  hold it from the moment that it comes in. A variant that waits beside the bank for 2 s has the
  one that would be the victim give no new holds, so it waits for what runs; after 60 s its requests
  end as RESOURCE_EXHAUSTED with a time to come again.

`VariantService.ListVariants` shows each variant's rate, whether it is kept, and its bytes on the
device and in host memory.

## Hit rates

{requests:,} requests a case at {rate:g} a second (Poisson, Zipf), put to the real table in
virtual time; "shifting" draws anew which variant is how popular every {shift:g} s. Settings:
half-life {policy.half_life_s:g} s, {policy.pinned} kept. Every policy takes in all that is asked
for, as a server must. Best online is the best of LRU, LFU, LFU-DA (GDSF with equal sizes), ARC,
SLRU, SIEVE and W-TinyLFU in that case; Belady knows the future.

{cases}

At worst {worst:.3f} of the best online policy, and at least {over_lru:.3f} above LRU. The six
most popular of steady traffic were loaded again {reloads} times once rates had settled (after
three half-lives).

![hit rates](cache.png)

## What requests wait for a slot

14 variants on 8 slots, Zipf 1, 2 requests a second that each hold a slot for 2 s on average; a
load takes 0.5 s; the same table with other settings.

{waits}

Keeping the most asked for saves loads and spares their requests any wait. The price is paid by
the rare ones, who share what is left: where rows are long-lived and slots few, fewer `--pinned`
shorten their wait.

## How much the half-life matters

100 variants on 20 slots, Zipf 1. Too long a half-life remembers what is no longer so, too short a
one counts too little to tell neighbours apart.

{sweep}
"""
