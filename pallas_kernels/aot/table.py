"""Compiles every form for every weight and writes what came out.

python -m pallas_kernels.aot.table docs/kernels.md      all of it, as a page
python -m pallas_kernels.aot.table out.json MODEL       one model's, as JSON
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from pallas_kernels.aot import forms, roofline
from pallas_kernels.aot.compile import Kernel
from pallas_kernels.bitdelta_matmul import mosaic_rows, mosaic_tiles

_PAGE = """# The kernels on Hopper

Written by `make kernels`, which compiles every form for an H100 without one. Instructions,
registers and shared memory are those of the compiled kernels. **Times are predictions** by
`pallas_kernels/aot/roofline.py`: nothing on this page was measured on a card. `make gpu-check`
measures, where there is one.

{ROWS} rows in decode, {VARIANTS} variants in a mixed batch, prompts of {PROMPT} tokens. Bound: the
bytes at the memory's bandwidth, or the matrix operations at the tensor cores' rate, whichever is
longer. Assumed for the base's product too: {reached:.0%} of the bandwidth, {start:.0f} us to start,
{l2:.1f} TB/s from the L2, {clock:.3f} GHz, at least {least} cycles for a wgmma of 64 outputs by 16
inputs. What XLA does before and after a kernel (rows in order, sums of parts) is counted by its
bytes: in a model it becomes part of the operations around the product.

The longest of these counts, as if they overlapped fully: a kernel that waits is slower. The base of
a long prompt is a product by the same tiles without signs, which the L2 holds to 73 % of the tensor
cores' rate; cuBLAS on a card may do better or worse. Mixed
batches on an H200 are held up by the 16 cycles: should a wgmma for 8 rows take fewer, they gain.

Signs against activations of 8 bits would halve the matrix operations and the unpacking. In numbers
(8192 inputs, error of the variant's part): bfloat16 0.2 %; int8 with a scale for each row 0.9 %,
but 11 % once one input in a thousand is 50 times as large, as activations of language models have
them, and still 6 % with a scale for every 1024 inputs; e4m3 2.8 %. At most 2 % is allowed, so x
stays in bfloat16.

"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One form at one weight."""

    model: str
    weight: str
    outputs: int
    inputs: int
    form: str
    kernel: Kernel
    complaints: list[str]
    estimate: roofline.Estimate
    base: roofline.Estimate

    @property
    def per_weight(self) -> float:
        """Integer instructions for a weight, of the costliest loop."""
        return max(loop.per_weight for loop in self.kernel.loops)


def rows(
    model: str, which: tuple[forms.Form, ...] = forms.FORMS, weights: tuple[str, ...] = ()
) -> list[Row]:
    """Compiles the forms for a model's weights, all of them or those named."""
    found = []
    for weight in weights or forms.MODELS[model]:
        outputs, inputs = forms.MODELS[model][weight]
        for form in which:
            before = time.perf_counter()
            (kernel,) = forms.compiled(form, outputs, inputs).kernels.values()
            took = time.perf_counter() - before
            print(f"{model}: {weight}, {form.name}: {took:.1f} s", file=sys.stderr)
            wrong = forms.complaints(kernel, form.warpgroups, form.limit)
            estimate, base = _estimates(form, outputs, inputs, kernel)
            found.append(
                Row(model, weight, outputs, inputs, form.name, kernel, wrong, estimate, base)
            )
    return found


def _estimates(
    form: forms.Form, outputs: int, inputs: int, kernel: Kernel
) -> tuple[roofline.Estimate, roofline.Estimate]:
    """The form's, and that of the base's product."""
    loop = max(kernel.loops, key=lambda each: each.per_weight)
    if form in (forms.PREFILL, forms.PREFILL_TWO):
        tuning = mosaic_tiles.tiles_tuning(forms.PROMPT, outputs)
        products = 1 if form is forms.PREFILL else 2
        of = (forms.PROMPT, outputs, inputs, tuning)
        return roofline.tiles(*of, loop, products), roofline.tiles(*of, None, 1)
    tuning = mosaic_rows.rows_tuning(forms.ROWS, outputs, inputs)
    entries, width = (1, forms.ROWS) if form is forms.ONE else (forms.VARIANTS, 8)
    base = roofline.base_rows(forms.ROWS, outputs, inputs)
    fused = roofline.fused_rows(forms.ROWS, outputs, inputs, entries, width, tuning, loop)
    return fused, base


def layer(found: list[Row], form: str, card: str) -> tuple[float, float, float]:
    """Of a layer's weights together, without the head: seconds, the base's, and of the bound."""
    of = [row for row in found if row.form == form and row.weight != "head"]
    time, base = (sum(e.time[card] for e in each) for each in zip(*_pairs(of), strict=True))
    return time, base, sum(row.estimate.bound[card] for row in of) / time


def _pairs(found: list[Row]) -> list[tuple[roofline.Estimate, roofline.Estimate]]:
    return [(row.estimate, row.base) for row in found]


def page(found: list[Row]) -> str:
    """The tables as Markdown."""
    text = _PAGE.format(
        ROWS=forms.ROWS,
        VARIANTS=forms.VARIANTS,
        PROMPT=forms.PROMPT,
        reached=roofline.REACHED,
        start=roofline.START * 1e6,
        l2=roofline.L2 / 1e12,
        clock=roofline.CLOCK / 1e9,
        least=roofline.LEAST_CYCLES,
    )
    lines = [text + "## A layer's weights together\n"]
    lines += ["| model | form | card | us | base, us | against the base | of the bound |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for model in dict.fromkeys(row.model for row in found):
        own = [row for row in found if row.model == model]
        for form in dict.fromkeys(row.form for row in own):
            for card in roofline.CARDS:
                lines.append(_summary(own, model, form, card))
    lines += ["", "## Each weight", ""]
    lines += [
        "Integer: instructions for a weight in the innermost loop. Then MB, G integer instructions "
        "of single threads, G matrix operations; us on each card, with the fraction of the bound.",
        "",
        "| model | weight | form | registers | shared KB | integer | MB | G int | G matrix | "
        "H100 | H200 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in found]
    return "\n".join(lines) + "\n"


def _summary(own: list[Row], model: str, form: str, card: str) -> str:
    time, base, fraction = layer(own, form, card)
    against = f"{time / base:.2f}x the time"
    if form == forms.MIXED.name:
        # One by one each variant takes at least the base's time; starting is counted once.
        starts = roofline.START * (len(own) // len(forms.FORMS) - 1)
        naive = forms.VARIANTS * (base - starts) + starts
        bound = 16 * forms.VARIANTS / (16 + forms.VARIANTS)
        against = f"{naive / time:.1f}x as fast as one by one (bound {bound:.2f}x)"
    return (
        f"| {model} | {form} | {card} | {time * 1e6:.0f} | {base * 1e6:.0f} | {against} | "
        f"{fraction:.0%} |"
    )


def _line(row: Row) -> str:
    each = row.estimate
    times = " | ".join(
        f"{each.time[card] * 1e6:.1f} ({each.fraction(card):.0%})" for card in roofline.CARDS
    )
    return (
        f"| {row.model} | {row.weight} {row.outputs} x {row.inputs} | {row.form} | "
        f"{row.kernel.registers} | {row.kernel.shared >> 10} | {row.per_weight:.2f} | "
        f"{each.bytes / 1e6:.0f} | {each.integer / 1e9:.2f} | {each.matrix / 1e9:.1f} | {times} |"
    )


def as_json(found: list[Row]) -> list[dict[str, Any]]:
    """The rows as plain values, each with its line of the page."""
    return [
        dataclasses.asdict(row) | {"per_weight": row.per_weight, "line": _line(row)}
        for row in found
    ]


def main(arguments: list[str]) -> int:
    """Writes the page; or the two forms of most rows at every weight, and one weight's others."""
    out = Path(arguments[0])
    if out.suffix == ".json":
        found = [row for model in forms.MODELS for row in rows(model, (forms.MIXED, forms.PREFILL))]
        others = (forms.ONE, forms.PREFILL_TWO)
        found += rows("Qwen2.5-72B on 8", others, ("down",))
        out.write_text(json.dumps(as_json(found)))
        return 0
    found = [row for model in forms.MODELS for row in rows(model)]
    for row in found:
        for complaint in row.complaints:
            print(f"{row.model}, {row.weight}, {row.form}: {complaint}", file=sys.stderr)
    out.write_text(page(found))
    return 1 if any(row.complaints for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
