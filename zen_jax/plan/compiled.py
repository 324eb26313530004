"""A plan's programs compiled for Hopper cards that are not here, and what they turned out to be.

`compile_points` runs in a process of its own, which has the compiler's plugin from the environment
.aot beside this one's packages. Layers are all alike, so programs of a few layers are compiled and
the figures of all layers follow: each is a constant and so much a layer, which a third program of
another depth has to confirm.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zen_jax.config import ModelConfig
from zen_jax.plan.memory import Layout, kernel_arrays

ROOT = Path(__file__).resolve().parents[2]
AOT = ROOT / ".aot"
# Depths that are compiled: the deepest two give the line, the third confirms it. Far apart, since
# what XLA keeps for all layers at once shows only once it is more than what one layer needs.
LAYERS = (2, 4, 16)
DECODE = "decode"
_LIMIT_S = 3600


def programs(lay: Layout) -> list[str]:
    """What is compiled: a decode step, and the two most unlike shapes that read as many tokens of
    prompts as a call does at most."""
    shapes = lay.sizes.shapes
    most = max(count * length for count, length in shapes)
    full = [shape for shape in shapes if shape[0] * shape[1] == most]
    return [DECODE, *(f"{c}x{t}" for c, t in sorted({full[0], full[-1]}))]


def compile_in_process(
    lay: Layout,
    which: Sequence[tuple[str, int]],
    progress: Callable[[str, int, int], None] | None = None,
    aot: Path = AOT,
) -> list[dict[str, Any]]:
    """Compiles programs in another process.

    Args:
      lay: what is planned.
      which: programs and their numbers of layers.
      progress: told what was compiled, how many are done and how many there are.
      aot: the environment with the compiler.

    Returns:
      One point each, see `compile_points`.

    Raises:
      ValueError: the compiler is not installed, or it failed.
    """
    packages = sorted(aot.glob("lib/python*/site-packages"))
    if not packages:
        raise ValueError(f"there is no {aot}, which compiles for an H100: run make setup")
    asked = {
        "config": lay.config.to_hf(),
        "variants": lay.variants,
        "sizes": dataclasses.asdict(lay.sizes),
        "devices": lay.devices,
        "which": list(which),
    }
    path = os.pathsep.join(str(part) for part in (ROOT, *packages))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with subprocess.Popen(
        [sys.executable, "-m", "zen_jax.plan.compiled"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            return _points(process, json.dumps(asked), len(which), progress)
        finally:
            process.kill()


def _points(
    process: "subprocess.Popen[str]",
    asked: str,
    count: int,
    progress: Callable[[str, int, int], None] | None,
) -> list[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(asked)
    process.stdin.close()
    found = []
    for line in process.stdout:
        found.append(json.loads(line))
        if progress is not None:
            name = f"{found[-1]['program']}, {found[-1]['layers']} layers"
            progress(name, len(found), count)
    if process.wait() or len(found) < count:
        last = process.stderr.read().strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"compiling for the cards failed: {last[0][:500]}")
    return found


def compile_points(asked: dict[str, Any]) -> None:
    """Compiles what is asked for on a mesh of H100s and prints a line of JSON for each program.

    A point has: program, layers, argument_bytes, temp_bytes and output_bytes (what is not written
    in place) of one card; kernels, how often our own are called; collectives, kind -> how many and
    bytes; copies, lines that copy what is held; seconds.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.aot import h100
    from zen_jax.delta.bank import BankSchema
    from zen_jax.engine import Engine
    from zen_jax.engine_state import EngineConfig
    from zen_jax.layout import map_specs
    from zen_jax.plan.hlo import Program
    from zen_jax.sharding import Placement

    mesh = h100.mesh(data=1, model=asked["devices"])
    sizes = EngineConfig(**asked["sizes"])
    whole = ModelConfig.from_hf(asked["config"])
    for name, layers in asked["which"]:
        config = dataclasses.replace(whole, num_layers=layers, windows=whole.windows[:layers])
        place = Placement.of(config, mesh)
        params = map_specs(
            lambda spec, at=place: jax.ShapeDtypeStruct(
                spec.shape, jnp.bfloat16, sharding=at.sharding(spec.axes)
            ),
            config,
        )
        engine = Engine(params, sizes, BankSchema.covering(config, asked["variants"]), mesh)
        key = name if name == DECODE else tuple(int(part) for part in name.split("x"))
        before = time.perf_counter()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            done = engine.programs.lowered(key).compile()
        memory: Any = done.memory_analysis()
        program = Program(done.as_text() or "")
        lay = Layout(config, asked["variants"], sizes, asked["devices"], ordered=True)
        point = {
            "program": name,
            "layers": layers,
            "argument_bytes": int(memory.argument_size_in_bytes),
            "temp_bytes": int(memory.temp_size_in_bytes),
            "output_bytes": int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
            "kernels": program.kernels(),
            "collectives": {
                kind: [len(sizes), sum(sizes)] for kind, sizes in program.collectives().items()
            },
            "copies": program.copies(kernel_arrays(lay)),
            "seconds": round(time.perf_counter() - before, 1),
        }
        print(json.dumps(point), flush=True)


def at_depth(points: Sequence[dict[str, Any]], layers: int) -> dict[str, Any]:
    """One program's figures with so many layers, from programs of fewer.

    Args:
      points: of one program; the one of that depth itself, or two depths or more, of which the
        deepest two give the line.
      layers: L.

    Returns:
      A point, with `off`: by how much, in bytes of temporaries, the others lie off the line.
      Counts have to lie on it exactly.

    Raises:
      ValueError: there are fewer than two points, or the counts do not lie on a line.
    """
    own = [point for point in points if point["layers"] == layers]
    if own:
        return own[0] | {"off": 0}
    if len(points) < 2 or points[0]["layers"] == points[1]["layers"]:
        raise ValueError(f"{len(points)} programs; two of different depths give a line")
    points = sorted(points, key=lambda point: point["layers"])
    first, second = (_flat(point) for point in points[-2:])
    start, step = points[-2]["layers"], points[-1]["layers"] - points[-2]["layers"]

    def line(depth: int) -> dict[str, float]:
        names = first.keys() | second.keys()
        return {
            name: first.get(name, 0)
            + (depth - start) * (second.get(name, 0) - first.get(name, 0)) / step
            for name in names
        }

    off = 0.0
    for point in points[:-2]:
        found, expected = _flat(point), line(point["layers"])
        for name in sorted(found.keys() | expected.keys()):
            missed = found.get(name, 0) - expected.get(name, 0)
            if missed and name not in ("temp_bytes", "output_bytes"):
                raise ValueError(f"{name} is no line over layers: off by {missed:g}")
            off = max(off, abs(missed))
    made = line(layers)
    kinds = {name.split()[0] for name in made if " " in name}
    return {
        "program": points[0]["program"],
        "layers": layers,
        **{name: round(value) for name, value in made.items() if " " not in name},
        "collectives": {k: [round(made[f"{k} n"]), round(made[f"{k} bytes"])] for k in kinds},
        "copies": [line for point in points for line in point["copies"]],
        "seconds": round(sum(point["seconds"] for point in points), 1),
        "off": round(off),
    }


def _flat(point: dict[str, Any]) -> dict[str, float]:
    names = ("argument_bytes", "temp_bytes", "output_bytes", "kernels")
    flat = {name: point[name] for name in names}
    for kind, (count, size) in point["collectives"].items():
        flat |= {f"{kind} n": count, f"{kind} bytes": size}
    return flat


if __name__ == "__main__":
    compile_points(json.load(sys.stdin))
