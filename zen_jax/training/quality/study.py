"""Measures methods on fine-tunes, one at a time, and goes on where it stopped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.delta.distill_layers import Samples
from zen_jax.evaluation.sheet import Sheet
from zen_jax.training import corpora, recipe, tasks
from zen_jax.training.format_study import family, smollm2
from zen_jax.training.format_study.formats import FORMATS, Format, share_of_zeros
from zen_jax.training.format_study.measure import Examiner
from zen_jax.training.format_study.study import Results, Subject, marks_kept, subject_key
from zen_jax.training.quality.methods import METHODS, Case
from zen_jax.training.quality.tunes import TUNES, fine_tune, read_windows
from zen_jax.training.recipe import VARIANTS
from zen_jax.training.residual import WEIGHTS, file_digest, float32_params, read_folder

TEXT_BATCHES, SKILL_BATCHES, HELD_BATCHES = 4, 6, 1
FAMILY_STEPS = 16
# SmolLM2: windows of 128 tokens that are fitted to, and that the best is chosen by.
TRAIN_WINDOWS, HELD_WINDOWS, WINDOW = 64, 8, 128
SMOLLM2_STEPS = 8
EXAM_WINDOWS = 16
_SOURCES = ("distill_fit", "distill_layers", "distill_logits", "distill_scales")


def family_cases(
    folder: Path, texts: Path, work: Path, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The demo family's variants, examined as its scores are, distilled on what training saw."""
    for name in names or VARIANTS:

        def make(name: str = name) -> Case:
            variant = VARIANTS[name]
            words, _ = tasks.split_words(corpora.load_words(texts))
            text = corpora.load(variant.corpus, texts) if variant.corpus else None
            batches = recipe.variant_batches(variant, words, text, seed=7)
            count = SKILL_BATCHES if text is None else TEXT_BATCHES

            def samples(start: int, stop: int) -> Samples:
                found = [batches(step)[0] for step in range(start, stop)]
                tokens = np.concatenate([b.tokens for b in found])
                return Samples(tokens, np.concatenate([b.weights for b in found]))

            return Case(
                family.subject(folder, texts, name),
                samples(0, count),
                samples(count, count + HELD_BATCHES),
                16 if text is None else 8,
                FAMILY_STEPS,
                work / name,
            )

        yield name, make


def smollm2_cases(
    base: Path, tunes: Path, texts: Path, work: Path, steps: int, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Fine-tunes of SmolLM2, trained first if need be.

    Args:
      base: in bfloat16, a Hugging Face folder; beside it the format study's fine-tunes.
      tunes: where fine-tunes are.
      texts: a cache of texts.
      work: for what is under way.
      steps: of fine-tuning.
      names: of `TUNES`; all by default.
    """
    for name in names or TUNES:

        def make(name: str = name) -> Case:
            tune = TUNES[name]
            tuned = base.parent / f"{steps}-steps" / name  # the format study's own, if it is one
            if not (tuned / WEIGHTS).exists():
                tuned = fine_tune(base, tunes, tune, texts, steps)
            config, start = read_folder(base)
            windows = read_windows(base, tune.corpus, texts)
            found = np.random.default_rng(smollm2.SEED).permutation(len(windows.train))
            rows = windows.train[found[: (TRAIN_WINDOWS + HELD_WINDOWS) // 2]]
            half = np.concatenate([rows[:, : WINDOW + 1], rows[:, WINDOW:]])
            every = np.ones((len(half), WINDOW), np.float32)
            at = np.linspace(0, len(windows.held_out) - 1, EXAM_WINDOWS).astype(int)
            sheet = Sheet.of_windows(windows.held_out[at], batch=2)
            _, after = read_folder(tuned)
            title = f"{tune.title}, {steps} steps"
            subject = Subject(name, title, config, start, after, sheet, tuple(FORMATS.values()))
            return Case(
                subject,
                Samples(half[HELD_WINDOWS:], every[HELD_WINDOWS:]),
                Samples(half[:HELD_WINDOWS], every[:HELD_WINDOWS]),
                4,
                SMOLLM2_STEPS,
                work / name,
            )

        yield name, make


def case_key(case: Case) -> str:
    """Changes with all that a measurement of our own methods depends on."""
    folder = Path(__file__).parents[2] / "delta"
    sources = [file_digest(folder / f"{name}.py")[:8] for name in _SOURCES]
    own = [file_digest(Path(__file__).with_name(f"{n}.py"))[:8] for n in ("methods", "deltazip")]
    shape = (case.train.tokens.shape, int(case.train.tokens.sum()), case.steps, case.rows)
    return " ".join([subject_key(case.subject), *sources, *own, repr(shape)])


def _same_format(marks: Mapping[str, Any] | None, made: Format) -> bool:
    """Whether the format study's marks are of this format; it looks after their freshness."""
    return marks is not None and marks["key"].partition(" ")[2] == made.spec


def measure(
    case: Case,
    methods: Iterable[str],
    results: Results,
    known: Results,
    say: Callable[[str], None],
) -> None:
    """Measures what is missing of a case and keeps it.

    Args:
      case: a fine-tune.
      methods: names of `METHODS`.
      results: where to keep measurements.
      known: the format study's, which examines on the same tokens; its marks are taken over.
      say: told each method that is done.
    """
    subject = case.subject
    matrices = [value for value in subject.base.values() if value.ndim == 2]
    about: dict[str, Any] = {
        "title": subject.title,
        "answers": subject.sheet.answers,
        "tokens": int(subject.sheet.counted.sum()),
        "zeros": round(share_of_zeros(subject.base, subject.tuned), 4),
        "weights": sum(value.size for value in matrices),
    }
    found = results.open(subject.name, about)
    theirs: Mapping[str, Any] = known.variants.get(subject.name, {})
    # A fine-tune of the same name that was trained for longer is another one.
    same = theirs.get("title") == subject.title
    before: Mapping[str, Any] = theirs["formats"] if same else {}
    own, plain = case_key(case), subject_key(subject)
    examine: Examiner | None = None
    for method in (METHODS[name] for name in methods):
        made = method.made
        key = f"{plain} {made.spec}" if isinstance(made, Format) else own
        if found.get(method.name, {}).get("key") == key:
            continue
        if isinstance(made, Format) and _same_format(before.get(made.name), made):
            found[method.name] = before[made.name]
        else:
            if examine is None:
                tuned = float32_params(subject.config, subject.tuned)
                examine = Examiner(subject.config, subject.sheet, tuned)
            stored = method.store(case)
            marks = marks_kept(examine(float32_params(subject.config, stored.tensors)))
            error = float(f"{stored.error:.5g}")
            found[method.name] = {"key": key, "bytes": stored.nbytes, "error": error, **marks}
        results.save()
        say(method.name)
