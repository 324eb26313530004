"""Predicted times against the kernels' own page, and against what can be worked out by hand."""

import dataclasses
import re
from pathlib import Path

import pytest

from zen_jax.config import ModelConfig
from zen_jax.engine_state import EngineConfig
from zen_jax.plan import roofline
from zen_jax.plan.chips import CHIPS, parse_chips
from zen_jax.plan.memory import Layout
from zen_jax.plan.models import read_model
from zen_jax.plan.report import Request, make_plan, most_variants

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"\| (.+) \| (one variant|mixed|prefill) \| (H\d00) \| (\d+) \| (\d+) \|")
MODELS = {
    "Llama-3.1-8B on 1": ("llama-3.1-8b", 1),
    "Llama-3.1-70B on 8": ("llama-3.1-70b", 8),
    "Qwen2.5-72B on 8": ("qwen2.5-72b", 8),
}


def layer_us(model: str, devices: int, card: str, entries: int) -> float:
    """Products of one layer with 16 rows: of two models that differ by one."""
    config = read_model(model)
    times = []
    for layers in (2, 3):
        own = dataclasses.replace(config, num_layers=layers)
        lay = Layout(own, 14, EngineConfig(rows=16), devices, ordered=True)
        times.append(roofline.decode_step(CHIPS[card], lay, 16, entries).products)
    return (times[1] - times[0]) * 1e6


def test_products_take_the_time_of_the_compiled_kernels() -> None:
    """Within 6 % of docs/kernels.md, which has each kernel's own instructions and tiles."""
    found = [line.groups() for line in LINE.finditer((ROOT / "docs/kernels.md").read_text())]
    decode = [of for of in found if of[1] != "prefill"]
    assert len(decode) == 12
    for model, form, card, us, base in decode:
        entries = {"one variant": 1, "mixed": 14}[form]
        assert layer_us(*MODELS[model], card, 0) == pytest.approx(int(base), rel=0.06)
        assert layer_us(*MODELS[model], card, entries) == pytest.approx(int(us), rel=0.06)


def test_a_prompt_is_read_in_chunks_and_the_last_may_be_short() -> None:
    lay = Layout(read_model("smollm2-135m"), 1, EngineConfig(rows=1, chunk_tokens=128))
    times = [roofline.prompt_read(CHIPS["H100"], lay, n) for n in (128, 129, 256)]
    layer = read_model("smollm2-135m").parameters
    assert times[0].flops < times[1].flops < times[2].flops
    # The last chunk's one token, and its logits: 2 operations a weight, the head once more a chunk.
    assert times[1].flops - times[0].flops < 1.1 * 2 * layer


def test_a_decode_step_reads_each_byte_once() -> None:
    lay = Layout(ModelConfig(512, 64, 128, 2, 8, 4, 8, 64), 2, EngineConfig(rows=1, max_length=32))
    weights = 512 * 64 + 2 * (16 * 8 * 64 + 64 * 64 + 3 * 128 * 64)
    base = roofline.decode_step(CHIPS["H100"], lay, 1, 0)
    two = roofline.decode_step(CHIPS["H100"], lay, 1, 2)
    rows = 512 + 2 * (16 * 8 + 64 + 2 * 128 + 64)
    assert two.bytes - base.bytes == weights * 2 / 8 + 4 * 2 * rows
    kv = 2 * 2 * 32 * 4 * 8  # of keys and values, of two layers
    inputs = 64 + 2 * (64 + 64 + 64 + 128)
    once = roofline.decode_step(CHIPS["H100"], lay, 1, 0, gathered=False)
    assert once.bytes == 2 * weights + 2 * inputs + 4 * rows + 4 * kv
    assert base.bytes - once.bytes == 2 * 4 * kv
    assert base.flops == 2 * weights + 2 * kv * 2


def test_sums_over_the_cards_are_counted() -> None:
    of = {n: Layout(read_model("llama-3.1-70b"), 14, EngineConfig(), n) for n in (1, 8, 16)}
    assert [roofline.all_reduces(lay) for lay in of.values()] == [0, 161, 81]
    chip = CHIPS["H100"]
    alone, eight = (roofline.decode_step(chip, of[n], 16, 0).reduces for n in (1, 8))
    assert alone == 0
    bytes_ = 161 * 16 * 8192 * 4 * 2 * 7 / 8 + 16 * 128256 * 2 * 7 / 8
    assert eight == pytest.approx(162 * 12e-6 + bytes_ / (0.8 * 450e9))


def test_a_plan_of_the_headline_fits_and_one_card_does_not() -> None:
    chip, count = parse_chips("8xH100")
    request = Request(read_model("llama-3.1-70b"), "70b", chip, count)
    figures = make_plan(request)
    held = figures["per_device"]
    parts = ("weights", "bank", "kv", "state", "temp")
    assert held["peak"] == sum(held[part] for part in parts) < 76e9
    assert 262e9 < figures["total_bytes"] < 1.02 * 262e9
    assert figures["full_copies_bytes"] == pytest.approx(1.96e12, rel=0.01)
    assert figures["full_copies_chips"] == 112
    assert figures["tpot_ms"]["one_variant"] <= 1.1 * figures["tpot_ms"]["base"]
    assert held["kv_tokens"] >= 64 * 8192
    most = most_variants(request)
    assert make_plan(dataclasses.replace(request, variants=most))["per_device"]["headroom"] >= 0
    more = dataclasses.replace(request, variants=most + 1)
    assert make_plan(more)["per_device"]["headroom"] < 0
    one = dataclasses.replace(request, count=1)
    assert make_plan(one)["per_device"]["headroom"] < 0 and most_variants(one) == -1


@pytest.mark.parametrize(
    "text", ["8xH900", "0xH100", "17xH100", "-1xH100", "xH100", "", "8 x H100"]
)
def test_unknown_cards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--chips is"):
        parse_chips(text)
