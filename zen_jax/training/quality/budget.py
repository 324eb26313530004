"""More bytes than one level takes: given to matrices by measured gain, in order, or at random.

Each way gets the same bytes and fills them as far as whole levels go. All ways take their matrices
from the same fits, to what the fine-tune's own layers see: they differ in levels alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.delta import distill_gain
from zen_jax.delta.distill_gain import Errors, measure_errors, spend
from zen_jax.delta.distill_layers import Walk
from zen_jax.delta.distill_scales import read_arrays, write_arrays
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import tensor_shapes
from zen_jax.training.format_study.measure import Examiner
from zen_jax.training.format_study.study import Results, marks_kept
from zen_jax.training.quality.methods import Case, plain, sides
from zen_jax.training.quality.study import case_key
from zen_jax.training.residual import file_digest, float32_params

# Of what second levels for all matrices take.
SHARES = (0.25, 0.5, 0.75)
SEEDS = (1, 2)
_MOST = 3
# Over signs, half of what `zen distill` makes; all ways have the same.
_SWEEPS = 2
# Windows or prompts of the exam.
_ROWS = 80


def in_turn(order: Sequence[str], costs: Mapping[str, int], room: int) -> dict[str, int]:
    """Levels where matrices get a second one in a fixed order, each that still fits."""
    levels = dict.fromkeys(order, 1)
    for name in order:
        if costs[name] <= room:
            levels[name] = 2
            room -= costs[name]
    return levels


def ways(
    names: Sequence[str], errors: Errors, costs: Mapping[str, int]
) -> Iterator[tuple[str, float, dict[str, int]]]:
    """(way, share of the second levels' bytes, levels by matrix)."""
    rooms = {share: int(share * sum(costs.values())) for share in SHARES}
    yield "one", 0.0, dict.fromkeys(names, 1)
    yield "two", 1.0, dict.fromkeys(names, 2)
    for share, room in rooms.items():
        yield "gain", share, spend(dict.fromkeys(names, 1), errors, costs, room)
        yield "order", share, in_turn(names, costs, room)
    for seed, (share, room) in itertools.product(SEEDS, rooms.items()):
        order = np.random.default_rng(seed).permutation(len(names))
        yield f"random-{seed}", share, in_turn([names[int(i)] for i in order], costs, room)


def measure(case: Case, results: Results, say: Callable[[str], None]) -> None:
    """All ways for one fine-tune.

    Args:
      case: the fine-tune.
      results: where to keep measurements; those that are there are not made again.
      say: told each one that is done.
    """
    subject, walk = case.subject, Walk(sweeps=_SWEEPS, rows=case.rows)
    both = sides(subject, plain(subject.base, subject.tuned))
    names = [n for n in tensor_shapes(subject.config) if both.delta(n).bits is not None]
    costs = {name: both.delta(name).nbytes for name in names}
    about = {
        "title": subject.title,
        "answers": subject.sheet.answers,
        "weights": sum(subject.base[name].size for name in names),
    }
    found = results.open(subject.name, about)
    key = f"{case_key(case)} {file_digest(Path(distill_gain.__file__))[:8]}"
    folder = case.work / f"budget-{key[-8:]}"
    folder.mkdir(parents=True, exist_ok=True)

    def keep(name: str, delta: WeightDelta) -> None:
        arrays = {"bits": np.asarray(delta.bits), "scale": np.asarray(delta.scale)}
        write_arrays(folder / f"{name}-{len(arrays['bits'])}.safetensors", arrays, {})

    errors = measure_errors(both, case.train, walk, _MOST, folder, keep=keep)
    sheet = subject.sheet.part(_ROWS, subject.sheet.batch)
    examine = Examiner(subject.config, sheet, float32_params(subject.config, subject.tuned))
    for way, share, levels in ways(names, errors, costs):
        name = f"{way}-{share:g}"
        if found.get(name, {}).get("key") == key:
            continue
        files = {n: folder / f"{n}-{number}.safetensors" for n, number in levels.items()}
        arrays = {n: read_arrays(file)[0] for n, file in files.items()}
        deltas = {n: WeightDelta(bits=a["bits"], scale=a["scale"]) for n, a in arrays.items()}
        tensors = {
            n: np.asarray(both.whole(n, deltas.get(n))) for n in tensor_shapes(subject.config)
        }
        marks = marks_kept(examine(float32_params(subject.config, tensors)))
        nbytes = sum((deltas.get(n) or both.delta(n)).nbytes for n in tensors)
        expected = sum(errors[n][number - 1] for n, number in levels.items())
        found[name] = {"key": key, "bytes": nbytes, "expected": float(f"{expected:.5g}"), **marks}
        found[name]["levels"] = _counts(levels)
        results.save()
        say(name)


def _counts(levels: Mapping[str, int]) -> dict[str, int]:
    each = sorted(levels.values())
    return {str(number): each.count(number) for number in dict.fromkeys(each)}


def table(variants: Mapping[str, Mapping[str, Any]]) -> str:
    """A row a budget: KL of each way of spending it."""
    lines = [
        "| variant | bytes | bits a weight | by gain | in order | at random | by gain, matrices "
        "with 1 / 2 / 3 levels |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, variant in variants.items():
        found = variant["formats"]
        for share in (0.0, *SHARES, 1.0):
            way = {0.0: "one", 1.0: "two"}.get(share, "gain")
            marks = found.get(f"{way}-{share:g}")
            if marks is None:
                continue
            bits = 8 * marks["bytes"] / variant["weights"]
            cells = [name, f"{marks['bytes']:,}", f"{bits:.2f}", _kl(marks["kl"])]
            others = [found.get(f"order-{share:g}", {}).get("kl")]
            drawn = [found.get(f"random-{seed}-{share:g}", {}).get("kl") for seed in SEEDS]
            drawn = [kl for kl in drawn if kl is not None]
            others.append(sum(drawn) / len(drawn) if drawn else None)
            cells += ["–" if kl is None else _kl(kl) for kl in others]
            cells.append(" / ".join(str(marks["levels"].get(str(n), 0)) for n in (1, 2, 3)))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _kl(value: float) -> str:
    return f"{value:.3g}"
