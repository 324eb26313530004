"""docs/quality.md's tables and its plot, from what was measured."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zen_jax.training.format_study.study import Results, publish, write_json
from zen_jax.training.quality import budget
from zen_jax.training.quality.methods import METHODS, OURS

Marks = Mapping[str, Any]
# Columns of the tables by variant.
_EACH = ("matrix", "bitdelta", "row", "svd-1", "closed-form", "fit", OURS)
_TWO = ("two-bit", "row-2", "svd-2", "deltazip", "ours-2")
_STUDIES = ("family", "smollm2", "asides", "budget")


def write(docs: Path, work: Path) -> None:
    """Puts what was measured into docs/quality.json, and its tables into docs/quality.md.

    Raises:
      ValueError: docs/quality.md lacks a marker.
    """
    path = docs / "quality.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for study in _STUDIES:
        results = Results(work / f"{study}.json")
        if results.variants:
            kept[study] = publish(results, {})
    write_json(path, kept)
    page = docs / "quality.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables(kept).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"{page} has no place for {name}; put <!-- {name} --> there")
        text = pattern.sub(lambda m, table=table: m[1] + table + m[2], text)
    page.write_text(text, encoding="utf-8")
    draw(kept, docs / "quality.png")


def gain(variant: Marks, marks: Marks) -> float:
    """(base - delta) / (base - fine-tune), in NLL."""
    formats = variant["formats"]
    base = formats.get("base") or formats["base-bf16"]
    base, tuned = base["nll"], formats["tuned"]["nll"]
    return (base - marks["nll"]) / (base - tuned)


def score(variant: Marks, marks: Marks) -> float:
    """Exact answers, or the NLL gain recovered."""
    return marks["exact"] if variant["answers"] else gain(variant, marks)


def tables(kept: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place."""
    made = {}
    for study in ("family", "smollm2"):
        variants = kept.get(study, {}).get("variants", {})
        made[study] = _means(variants)
        made[f"{study}-each"] = _each(variants, ("base", *_EACH, "tuned"))
        made[f"{study}-two"] = _each(variants, _TWO)
    beside = kept.get("asides", {}).get("variants", {})
    made["eight"] = _eight(beside)
    made["spending"] = _spending(beside)
    made["budget"] = budget.table(kept.get("budget", {}).get("variants", {}))
    made["prompt-only"] = _each(beside, ("base-bf16", "prompt-only", "row-bf16", "tuned"))
    return made


def _spending(variants: Mapping[str, Marks]) -> str:
    """A row a way to spend bytes, a column a variant: the error that is left."""
    found = {n: v["formats"] for n, v in variants.items() if "2 levels" in v["formats"]}
    lines = [
        "| kept of a layer's matrix | bits a weight | " + " | ".join(found) + " |",
        "| --- | ---: |" + " ---: |" * len(found),
    ]
    first = next(iter(found.values()), {})
    for name in (name for name in first if "level" in name):
        errors = [f"{formats[name]['error']:.4f}" for formats in found.values()]
        lines.append(f"| {name} | {first[name]['bits']:.2f} | " + " | ".join(errors) + " |")
    return "\n".join(lines) + "\n"


def _eight(variants: Mapping[str, Marks]) -> str:
    """A row a base, of each variant its KL to the fine-tune and the score."""
    lines = [
        "| base | bytes of the base | " + " | ".join(variants) + " |",
        "| --- | ---: |" + " --- |" * len(variants),
    ]
    for name in ("bf16", "int8", "fp8"):
        cells = []
        for variant in variants.values():
            found = [variant["formats"].get(f"{part}-{name}") for part in ("base", "row", "fit")]
            if all(found):
                cells.append(" / ".join(f"{_eight_score(variant, marks):.3f}" for marks in found))
        nbytes = {v["formats"].get(f"base-{name}", {}).get("bytes") for v in variants.values()}
        if len(cells) == len(variants) and cells:
            lines.append(f"| {name} | {nbytes.pop():,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _eight_score(variant: Marks, marks: Marks) -> float:
    """Exact answers, or NLL."""
    return marks["exact"] if variant["answers"] else marks["nll"]


def _means(variants: Mapping[str, Marks]) -> str:
    """A row a method: means over the variants that it was measured on."""
    lines = [
        "| method | bits a weight | skills: exact | - fine-tune | worst | texts: gain | worst "
        "| texts: KL | of |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in METHODS.values():
        found = [
            (v, v["formats"][method.name]) for v in variants.values() if method.name in v["formats"]
        ]
        if not found or method.name == "base":
            continue
        bits = [8 * m["bytes"] / v["weights"] for v, m in found]
        skills = [(v, m) for v, m in found if v["answers"]]
        texts = [(v, m) for v, m in found if not v["answers"]]
        lost = [m["exact"] - v["formats"]["tuned"]["exact"] for v, m in skills]
        gains = [gain(v, m) for v, m in texts]
        exact = [m["exact"] for _, m in skills]
        kl = [m["kl"] for _, m in texts]
        cells = [
            method.title,
            f"{_mean(bits):.2f}",
            *(_shown(x, ".3f") for x in (_mean(exact), _mean(lost), min(lost, default=None))),
            *(_shown(x, ".3f") for x in (_mean(gains), min(gains, default=None))),
            _shown(_mean(kl), ".3g"),
            str(len(found)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _each(variants: Mapping[str, Marks], methods: Sequence[str]) -> str:
    """A row a variant, a column a method: exact answers, or the gain recovered."""
    methods = [m for m in methods if any(m in v["formats"] for v in variants.values())]
    lines = [
        "| variant | zeros | score | " + " | ".join(f"`{m}`" for m in methods) + " |",
        "| --- | ---: | --- |" + " ---: |" * len(methods),
    ]
    for name, variant in sorted(variants.items()):
        kind = "exact" if variant["answers"] else "gain"
        formats = variant["formats"]
        cells = [f"{score(variant, formats[m]):.3f}" if m in formats else "–" for m in methods]
        lines.append(f"| {name} | {variant['zeros']:.1%} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw(kept: Mapping[str, Any], path: Path) -> None:
    """KL against bits a weight, means over texts, one panel a study; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for at, study in zip(axes, ("family", "smollm2"), strict=True):
        variants = kept.get(study, {}).get("variants", {}).values()
        for method in METHODS.values():
            texts = [v for v in variants if not v["answers"] and method.name in v["formats"]]
            found = [(v, v["formats"][method.name]) for v in texts]
            if not found or method.bits not in (1, 2):
                continue
            bits = sum(8 * m["bytes"] / v["weights"] for v, m in found) / len(found)
            kl = sum(m["kl"] for _, m in found) / len(found)
            at.plot(bits, kl, "o" if "our" in method.name else "x")
            at.annotate(
                method.name, (bits, kl), fontsize=7, xytext=(4, 2), textcoords="offset points"
            )
        at.set(title=f"{study}: texts", xlabel="bits a weight", ylabel="KL, nats", yscale="log")
        at.grid(True, color="#eeeeee", linewidth=0.6)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
