"""The demo family as subjects of the study: every variant, on the exam that its score is from."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from zen_jax.evaluation.sheet import Sheet
from zen_jax.training import residual, scoring
from zen_jax.training.format_study.formats import FORMATS
from zen_jax.training.format_study.study import Subject
from zen_jax.training.recipe import VARIANTS

ABOUT = {
    "base": "family/base",
    "prompts": scoring.SAMPLES,
    "windows": scoring.WINDOWS,
    "window_bytes": scoring.WINDOW_BYTES,
}
# Windows or prompts of each variant that go through decode steps.
SERVED_ROWS = 64


def subjects(
    family: Path, texts: Path, names: Sequence[str] | None = None
) -> Mapping[str, Callable[[], Subject]]:
    """Variant -> what makes its subject.

    Args:
      family: the family's folder.
      texts: a cache of texts; fetched into it by package name if need be.
      names: variants; all by default.

    Raises:
      ValueError: there is no variant of a name.
    """
    unknown = sorted(set(names or ()) - set(VARIANTS))
    if unknown:
        raise ValueError(f"no variant is called {', '.join(unknown)}; see {', '.join(VARIANTS)}")
    return {name: partial(subject, family, texts, name) for name in names or VARIANTS}


def subject(family: Path, texts: Path, name: str) -> Subject:
    """A variant of the family in the formats of `FORMATS`.

    Raises:
      ValueError: the family is damaged or texts cannot be fetched.
    """
    variant = VARIANTS[name]
    config, base = residual.read_folder(family / "base")
    path = family / "residuals" / f"{name}.safetensors"
    tuned = residual.load_residual(path, family / "base", base)
    exam = scoring.make_exam(variant, texts)
    if exam.examples is not None:
        sheet = Sheet.of_examples(exam.examples, batch=125)
    elif exam.windows is not None:
        sheet = Sheet.of_windows(exam.windows, batch=16)
    else:
        raise ValueError(f"the exam of {name} is empty")
    return Subject(name, variant.title, config, base, tuned, sheet, tuple(FORMATS.values()))
