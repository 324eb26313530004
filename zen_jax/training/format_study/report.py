"""docs/format.md's tables and docs/format.png, from docs/format.json and nothing else."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zen_jax.training.format_study.formats import DEFAULT, FORMATS, GROUPS
from zen_jax.training.format_study.study import SERVED, write_json

Study = Mapping[str, Any]

# Columns of the table by variant: formats whose order a reader wants to know for each of them.
EACH = (
    "base",
    DEFAULT,
    "row-column",
    "ternary",
    "row-2",
    "row-2-together",
    "two-bit",
    "svd-1",
    "svd-2",
    "tuned",
)


def load(path: Path) -> dict[str, Study]:
    """All studies in docs/format.json; none where there is no such file.

    Raises:
      ValueError: it is damaged.
    """
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))["studies"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no studies: {error}; remove it") from error


def write(docs: Path, name: str | None = None, study: Study | None = None) -> None:
    """Puts a study into DOCS/format.json, and the file's tables and plot beside it.

    Args:
      docs: the folder; format.md lies there with its text, format.png is made.
      name, study: the study to replace; None to write tables and plot again.

    Raises:
      ValueError: format.json is damaged, or format.md is missing or has no places for tables.
    """
    studies = load(docs / "format.json")
    if name is not None and study is not None:
        studies = {**studies, name: study}
        write_json(docs / "format.json", {"format": 1, "studies": studies})
    page = docs / "format.md"
    if not page.exists():
        raise ValueError(f"{page} is missing; its text is written by hand, its tables are not")
    text = fill(page.read_text(encoding="utf-8"), studies)
    page.write_text(text, encoding="utf-8")
    if studies:
        from zen_jax.training.format_study.plot import draw  # only who plots needs matplotlib

        draw(studies, docs / "format.png")


def fill(page: str, studies: Mapping[str, Study]) -> str:
    """The page with each table between its marks <!-- NAME --> and <!-- end --> written again.

    Raises:
      ValueError: a table has no place, or a mark has no end.
    """
    for name, table in tables(studies).items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if len(place.findall(page)) != 1:
            raise ValueError(f"expected one place <!-- {name} --> ... <!-- end --> on the page")
        page = place.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", page)
    return page


def tables(studies: Mapping[str, Study]) -> dict[str, str]:
    """Every table of the studies there are, by its mark."""
    made: dict[str, str] = {}
    if "family" in studies:
        variants = studies["family"]["variants"]
        made["family"] = family_table(variants)
        made["family-each"] = each_table(variants)
    if "smollm2" in studies:
        made["smollm2"] = text_table(studies["smollm2"]["variants"])
    served = {
        name: study["variants"]
        for name, study in studies.items()
        if all(SERVED in variant for variant in study["variants"].values())
    }
    if served:
        made["served"] = served_table(served)
        made["served-tables"] = lookup_table(served)
    return made


def family_table(variants: Mapping[str, Study]) -> str:
    """Formats by means over the variants that learnt a text, and over those that give answers."""
    texts = [v for v in variants.values() if not v["answers"]]
    skills = [v for v in variants.values() if v["answers"]]

    def cells(name: str) -> list[str]:
        return [
            *_size_cells(list(variants.values()), name),
            _number(mean(texts, name, "nll"), 3),
            _small(mean(texts, name, "kl")),
            _number(mean(skills, name, "nll"), 4),
            _small(mean(skills, name, "kl")),
            _number(mean(skills, name, "exact"), 3),
        ]

    head = ["texts NLL", "texts KL", "answers NLL", "answers KL", "exact match"]
    return _by_format(list(variants.values()), [*_SIZE_HEAD, *head], cells)


def text_table(variants: Mapping[str, Study]) -> str:
    """Formats of each variant of a study on texts, one table a variant."""

    def cells_of(variant: Study) -> Callable[[str], list[str]]:
        def cells(name: str) -> list[str]:
            nll = mean([variant], name, "nll")
            return [
                *_size_cells([variant], name),
                _number(nll, 4),
                _number(math.exp(nll), 2),
                _small(mean([variant], name, "kl")),
            ]

        return cells

    head = [*_SIZE_HEAD, "NLL", "perplexity", "KL"]
    made = [
        f"**{v['title']}**: {v['zeros']:.1%} of the deltas are exactly 0.\n\n"
        + _by_format([v], head, cells_of(v))
        for v in variants.values()
    ]
    return "\n".join(made)


def each_table(variants: Mapping[str, Study]) -> str:
    """Each variant by some formats: exact match, or NLL for a text."""
    shown = [name for name in EACH if all(name in v["formats"] for v in variants.values())]
    rows = []
    for name, variant in variants.items():
        part = "exact" if variant["answers"] else "nll"
        values = [_number(variant["formats"][f][part], 3) for f in shown]
        rows.append([name, f"{variant['zeros']:.1%}", _METRICS[part], *values])
    return _markdown(["variant", "zeros", "score", *shown], rows, left=3)


def served_table(studies: Mapping[str, Mapping[str, Study]]) -> str:
    """The default format in each arithmetic: means over the family's variants that learnt a text,
    and over those that give answers; each variant of another study."""
    rows: list[list[str]] = []
    for title, variants in _served_together(studies):
        kept = [v[SERVED] for v in variants]
        whole = _average([k["whole"]["kl"] for k in kept])
        answers = variants[0]["answers"]
        for name, words in _ARITHMETIC.items():
            kl = _average([k[name]["kl"] for k in kept])
            exact = _average([k[name]["exact"] for k in kept] if answers else [])
            rows.append(
                [
                    title,
                    words,
                    f"{sum(k['tokens'] for k in kept):,}",
                    _number(_average([k[name]["nll"] for k in kept]), 4),
                    _small(kl),
                    f"{kl / whole - 1:+.2%}" if whole and name in _SERVED else "–",
                    _number(exact, 3),
                ]
            )
    head = ["examined", "arithmetic", "tokens", "NLL", "KL", "KL, to whole", "exact match"]
    return _markdown(head, rows, left=2)


def lookup_table(studies: Mapping[str, Mapping[str, Study]]) -> str:
    """The share of words of 32 inputs that had a coarse look-up table as well, float32
    activations, by the kind of the weight that they are multiplied with."""
    rows = {kind: [title] for kind, title in _KINDS.items()}
    for variants in studies.values():
        for kind, row in rows.items():
            each = [v[SERVED]["float32"]["tables"][kind] for v in variants.values()]
            once, *more = (sum(count) for count in zip(*each, strict=True))
            row.append(f"{sum(more) / (once + sum(more)):.1%}")
    names = [_STUDIES.get(name, name) for name in studies]
    return _markdown(["input of", *names], list(rows.values()), left=1)


def _served_together(
    studies: Mapping[str, Mapping[str, Study]],
) -> list[tuple[str, list[Study]]]:
    """Titles, and the variants that a mean is taken over."""
    parts: list[tuple[str, list[Study]]] = []
    for name, variants in studies.items():
        if name == "family":
            texts = [v for v in variants.values() if not v["answers"]]
            skills = [v for v in variants.values() if v["answers"]]
            parts += [("the family's texts", texts), ("the family's skills", skills)]
        else:
            parts += [(f"{_STUDIES.get(name, name)}, {v['title']}", [v]) for v in variants.values()]
    return [(title, variants) for title, variants in parts if variants]


def mean(variants: Sequence[Study], name: str, part: str) -> float:
    """The mean of a figure of one format over variants; NaN for none."""
    return _average([v["formats"][name][part] for v in variants])


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


_STUDIES = {"family": "family", "smollm2": "SmolLM2"}
_ARITHMETIC = {
    "whole": "whole weights, float32",
    "float32": "as served, float32",
    "products": "as served, rounded at weights",
    "bfloat16": "as served, bfloat16",
    "own-products": "the fine-tune's own weights, rounded at weights",
    "own-bfloat16": "the fine-tune's own weights, bfloat16",
}
# Held against whole weights in the same format: those in which the default format is served.
_SERVED = ("float32", "products", "bfloat16")
_KINDS = {
    "qkv": "q, k, v",
    "o": "attention's output",
    "gate_up": "gate, up",
    "down": "down",
    "head": "head",
}
_METRICS = {"exact": "exact match", "nll": "NLL"}
_SIZE_HEAD = ["bytes", "of bf16", "error"]


def _size_cells(variants: Sequence[Study], name: str) -> list[str]:
    nbytes = mean(variants, name, "bytes")
    copy = sum(v["bf16_bytes"] for v in variants) / len(variants)
    return [f"{nbytes:,.0f}", f"{nbytes / copy:.2%}", _number(mean(variants, name, "error"), 3)]


def _by_format(
    variants: Sequence[Study], head: Sequence[str], cells: Callable[[str], list[str]]
) -> str:
    """A table of all formats that every variant was measured in, grouped."""
    rows: list[list[str]] = []
    for group in GROUPS:
        members = [
            f
            for f in FORMATS.values()
            if f.group == group and all(f.name in v["formats"] for v in variants)
        ]
        if members:
            rows.append([f"**{group}**", *[""] * (len(head) + 1)])
        rows += [[f.title, f"`{f.name}`", *cells(f.name)] for f in members]
    return _markdown(["format", "name", *head], rows, left=2)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _small(value: float) -> str:
    """A divergence: to three significant digits, and 0 below 1e-6, where rounding noise begins."""
    if math.isnan(value):
        return "–"
    return "0" if abs(value) < 1e-6 else f"{value:.3g}"
