"""Takes fine-tunes through formats, one measurement at a time, and goes on where it stopped."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from zen_jax.config import ModelConfig
from zen_jax.delta import compress, levels
from zen_jax.evaluation.sheet import Sheet
from zen_jax.training.format_study import codecs, measure
from zen_jax.training.format_study.formats import Format, Tensors, share_of_zeros, store
from zen_jax.training.format_study.measure import Examiner, Marks
from zen_jax.training.residual import file_digest, float32_params

# Of a variant in the results: what `zen_jax.training.format_study.served` measured.
SERVED = "served"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A fine-tune to be stored in all formats.

    Attributes:
      name: of the variant.
      title: what it does.
      config: its architecture.
      base, tuned: Hugging Face tensors as they are stored, bfloat16.
      sheet: what it is examined on.
      formats: what it is taken through.
      about: more to keep beside the results.
    """

    name: str
    title: str
    config: ModelConfig
    base: Tensors
    tuned: Tensors
    sheet: Sheet
    formats: Sequence[Format]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Results:
    """Measurements in a JSON file, written after each one. Each has a key, and an old one counts
    only if what it was made from has not changed."""

    def __init__(self, path: Path) -> None:
        """Opens a file, or starts one.

        Raises:
          ValueError: the file is no such file.
        """
        self.path = path
        self.variants: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self.variants = json.loads(path.read_text(encoding="utf-8"))["variants"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path} holds no results: {error}; remove it") from error

    def open(self, name: str, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """A variant's measurements so far, by format; what is said about it is replaced."""
        measured = {"formats": {}, **self.variants.get(name, {})}
        kept = {part: measured[part] for part in ("formats", SERVED) if part in measured}
        self.variants[name] = {**about, **kept}
        return kept["formats"]

    def save(self) -> None:
        """Writes the file: whole or not at all."""
        write_json(self.path, {"variants": self.variants})


def write_json(path: Path, value: Any) -> None:
    """Writes JSON to a file: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def subject_key(subject: Subject) -> str:
    """Changes with the weights, the sheet and the source of the codecs and of the product's own
    compression: what measurements depend on."""
    sources = [module.__file__ for module in (codecs, compress, levels)]
    parts = [
        measure.tensors_digest(subject.base),
        measure.tensors_digest(subject.tuned),
        subject.sheet.digest,
        *(file_digest(Path(source)) for source in sources if source),
    ]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def measure_subject(subject: Subject, results: Results, measured: Callable[[str], None]) -> None:
    """Measures what is missing of a subject and keeps it.

    Args:
      subject: a fine-tune.
      results: where to keep measurements.
      measured: told the name of each format that is done, those found done too.
    """
    matrices = [value for value in subject.base.values() if value.ndim == 2]
    about = {
        "title": subject.title,
        "answers": subject.sheet.answers,
        "tokens": int(subject.sheet.counted.sum()),
        "zeros": _rounded(share_of_zeros(subject.base, subject.tuned)),
        "weights": sum(value.size for value in matrices),
        "bf16_bytes": 2 * sum(value.size for value in subject.base.values()),
        **subject.about,
    }
    formats = results.open(subject.name, about)
    key = subject_key(subject)
    examine: Examiner | None = None
    for chosen in subject.formats:
        wanted = f"{key} {chosen.spec}"
        if formats.get(chosen.name, {}).get("key") != wanted:
            if examine is None:
                tuned = float32_params(subject.config, subject.tuned)
                examine = Examiner(subject.config, subject.sheet, tuned)
            formats[chosen.name] = {"key": wanted, **measure_format(subject, chosen, examine)}
            results.save()
        measured(chosen.name)


def measure_format(subject: Subject, chosen: Format, examine: Examiner) -> dict[str, Any]:
    """One fine-tune in one format: bytes, error of the delta, and marks."""
    stored = store(chosen, subject.base, subject.tuned)
    marks = examine(float32_params(subject.config, stored.tensors))
    return {"bytes": stored.nbytes, "error": _rounded(stored.error), **marks_kept(marks)}


def marks_kept(marks: Marks) -> dict[str, float | None]:
    """Marks as results keep them."""
    return {
        "nll": _rounded(marks.nll),
        "kl": _rounded(marks.kl),
        "exact": None if marks.exact is None else _rounded(marks.exact),
    }


def _rounded(value: float) -> float:
    """Five significant digits: what is below them differs from machine to machine."""
    return float(f"{value:.5g}")


def run(
    subjects: Mapping[str, Callable[[], Subject]], results: Results, progress: bool = True
) -> None:
    """Measures subjects one after the other.

    Args:
      subjects: name -> how it is made, called when its turn comes.
      results: where to keep measurements.
      progress: whether to show a bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, disable=not progress) as bar:
        whole = bar.add_task("fine-tunes", total=len(subjects), note="")
        for name, make in subjects.items():
            subject = make()
            each = bar.add_task(name, total=len(subject.formats), note="")

            def measured(chosen: str, each: TaskID = each) -> None:
                bar.update(each, advance=1, note=chosen)

            measure_subject(subject, results, measured)
            bar.remove_task(each)
            bar.update(whole, advance=1)


def publish(results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """A study as docs/format.json keeps it: what was measured, without keys."""
    variants = {}
    for name, variant in results.variants.items():
        formats = {chosen: _without_key(marks) for chosen, marks in variant["formats"].items()}
        served = {SERVED: _without_key(variant[SERVED])} if SERVED in variant else {}
        variants[name] = {**variant, "formats": formats, **served}
    return {**about, "variants": variants}


def _without_key(marks: Mapping[str, Any]) -> dict[str, Any]:
    return {part: value for part, value in marks.items() if part != "key"}
