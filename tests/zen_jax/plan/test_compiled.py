"""The 70B step as it is compiled for eight H100s, of which none is needed.

A process with the environment .aot compiles; see `make setup`. What `make test` leaves out, the
calls that read prompts and the confirmation of the line over layers, runs with --soak.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from zen_jax.plan import compiled, memory, roofline
from zen_jax.plan.chips import parse_chips
from zen_jax.plan.models import read_model
from zen_jax.plan.report import Request, make_plan, with_compiled

CHIP, COUNT = parse_chips("8xH100")
REQUEST = Request(read_model("llama-3.1-70b"), "llama-3.1-70b", CHIP, COUNT)
LAYERS = 2


def held(layers: int) -> int:
    """Bytes that one card holds of a model with so many layers, by the plan."""
    config = dataclasses.replace(REQUEST.config, num_layers=layers)
    lay = dataclasses.replace(REQUEST, config=config).layout
    of = memory.weight_bytes(lay.share) + memory.bank_bytes(lay.share, lay.variants, True)
    return of + memory.kv_bytes(lay) + memory.state_bytes(lay)


def largest_page_pool() -> int:
    """Bytes of one layer's keys on one card."""
    return memory.kv_bytes(REQUEST.layout) // (2 * REQUEST.config.num_layers)


@pytest.mark.timeout(900)
def test_a_decode_step_for_eight_cards() -> None:
    """Nothing that is held is copied, every product is our kernel, two sums a layer."""
    (point,) = compiled.compile_in_process(REQUEST.layout, [(compiled.DECODE, LAYERS)])
    assert point["copies"] == []
    assert point["kernels"] == 4 * LAYERS + 1, "q|k|v, o, gate|up and down of a layer; the head"
    sums, gathers = (point["collectives"].pop(kind) for kind in ("all-reduce", "all-gather"))
    assert point["collectives"] == {}
    assert sums == [2 * LAYERS + 1, (2 * LAYERS + 1) * 64 * 8192 * 4]
    assert gathers == [1, 64 * 128256 * 2], "the logits, to choose tokens from"
    lay = dataclasses.replace(
        REQUEST, config=dataclasses.replace(REQUEST.config, num_layers=LAYERS)
    ).layout
    assert roofline.all_reduces(lay) == sums[0]
    # Beside what the plan counts there are a page table, and few numbers more.
    assert 0 <= point["argument_bytes"] - held(LAYERS) < 1 << 20
    assert point["output_bytes"] < 1 << 20, "all else is written in place"
    estimate = memory.temporary_bytes(REQUEST.layout)
    assert 0.9 * estimate < point["temp_bytes"] < 1.1 * estimate
    # Keys and values gathered for one layer, and less than a third such array beside them.
    assert point["temp_bytes"] < 3 * largest_page_pool()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_all_layers_follow_from_few_and_the_whole_fits() -> None:
    lay = REQUEST.layout
    which = [(name, depth) for name in compiled.programs(lay) for depth in compiled.LAYERS]
    points = compiled.compile_in_process(lay, which)
    figures = with_compiled(make_plan(REQUEST), REQUEST, points)
    layers = REQUEST.config.num_layers
    assert figures["per_device"]["peak"] < 76e9
    assert figures["collectives"]["all_reduce"] == 2 * layers + 1
    made = figures["compiled"]["programs"]
    assert made[compiled.DECODE]["kernels"] == 4 * layers + 1
    for one in made.values():
        assert one["copies"] == []
        assert 0 <= one["argument_bytes"] - held(layers) < 1 << 20
        # Counts lie on the line; XLA packs temporaries otherwise at another depth.
        assert one["off"] < 128 << 20


def point(layers: int, **changed: Any) -> dict[str, Any]:
    """Figures that lie on a line over layers."""
    return {
        "program": "decode",
        "layers": layers,
        "argument_bytes": 1000 + 10 * layers,
        "temp_bytes": 500,
        "output_bytes": 0,
        "kernels": 4 * layers + 1,
        "collectives": {"all-reduce": [2 * layers + 1, 64 * (2 * layers + 1)]},
        "copies": [],
        "seconds": 1.0,
        **changed,
    }


def test_a_line_over_layers() -> None:
    made = compiled.at_depth([point(2), point(3), point(5)], 80)
    want = point(80) | {"seconds": 3.0, "off": 0}
    assert made == want
    assert compiled.at_depth([point(2), point(3), point(4, temp_bytes=507)], 80)["off"] == 7
    assert compiled.at_depth([point(2, copies=["a"]), point(3)], 80)["copies"] == ["a"]


def test_what_is_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels is no line"):
        compiled.at_depth([point(2), point(3), point(4, kernels=18)], 80)
    odd = point(4, collectives={"all-reduce": [9, 64 * 9], "all-to-all": [1, 8]})
    with pytest.raises(ValueError, match="all-to-all bytes is no line"):
        compiled.at_depth([point(2), point(3), odd], 80)
    assert compiled.at_depth([point(80, temp_bytes=7)], 80) == point(80, temp_bytes=7) | {"off": 0}
    for few in ([point(2)], [point(2), point(2)]):
        with pytest.raises(ValueError, match="two of different depths"):
            compiled.at_depth(few, 80)


def test_without_the_compiler_it_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run make setup"):
        compiled.compile_in_process(REQUEST.layout, [("decode", 1)], aot=tmp_path)


def test_a_compiler_that_fails_is_one_line(tmp_path: Path) -> None:
    """Packages without the plugin."""
    (tmp_path / "lib/python3.12/site-packages").mkdir(parents=True)
    with pytest.raises(ValueError, match="compiling for the cards failed: .*") as caught:
        compiled.compile_in_process(REQUEST.layout, [("decode", 1)], aot=tmp_path)
    assert "\n" not in str(caught.value)
