"""Tasks that are made here, with exact answers: the demo family's skills, and reasoning-gym's.

A skill comes twice, both times with inputs that training never saw: of all lengths, and at the edge
of what training had, words as long as any there and sums above 120. (Beyond it, with nine letters,
the demo family's fine-tunes answer nothing, so that there would be nothing to compare.)
"""

import dataclasses
from pathlib import Path

import numpy as np

from zen_jax.evaluation.questions import Limits, TestSet, of_examples, task_tokens
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.tasks import (
    SKILLS,
    Example,
    Rng,
    Words,
    draw,
    draw_named,
    held_out,
    split_words,
)

ULTRA = "ultra"
GENERATED = (*SKILLS, ULTRA)


@dataclasses.dataclass(frozen=True)
class Letters(Words):
    """Random letters that training never saw, in place of words.

    Attributes:
      edge: only the longest words of a skill, and large numbers.
    """

    edge: bool = False

    def draw(self, rng: Rng, longest: int) -> str:
        """One word of 3 to `longest` letters, or of `longest`."""
        low = longest if self.edge else 3
        while True:
            letters = rng.integers(97, 123, size=int(rng.integers(low, longest + 1)))
            word = bytes(letters.tolist()).decode()
            if held_out(word):
                return word

    def number(self, rng: Rng) -> int:
        """A number of two digits, 60 or more at the edge."""
        return int(rng.integers(60 if self.edge else 10, 100))


def skill_sets(
    name: str, tokenizer: Tokenizer, limits: Limits, seed: int, words: Path | None = None
) -> tuple[TestSet, TestSet]:
    """A skill of the demo family twice: within what was trained, and at its edge.

    Args:
      name: one of `GENERATED`.
      tokenizer: of the fine-tune.
      limits: how many.
      seed: another one gives other tasks.
      words: a file of words, one a line, of which the held-out fifth is used; None uses random
        letters.

    Raises:
      ValueError: there is no such skill, or the file has too few words, or the models cannot read
        the tasks.
      OSError: the file cannot be read.
    """
    if name not in GENERATED:
        raise ValueError(f"no skill is called {name!r}; there are {', '.join(GENERATED)}")
    within: Words = Letters((), True)
    if words is not None:
        _, within = split_words(words.read_text(encoding="utf-8").split())
    edge = Letters((), True, edge=True)
    return (
        _set(name, within, tokenizer, limits, (seed, 0), edge=False),
        _set(f"{name}-edge", edge, tokenizer, limits, (seed, 1), edge=True),
    )


def _set(
    name: str,
    words: Words,
    tokenizer: Tokenizer,
    limits: Limits,
    seed: tuple[int, int],
    *,
    edge: bool,
) -> TestSet:
    rng = np.random.default_rng(seed)
    skill = SKILLS.get(name.removesuffix("-edge"))
    found: dict[Example, None] = {}
    tries = 0
    while len(found) < limits.examples and tries < 100 * limits.examples:
        example = draw_named(words, rng) if skill is None else draw(skill, words, rng)
        found[example] = None
        tries += 1
    tokens = [task_tokens(tokenizer, f"{e.prompt}\n", e.answer) for e in found]
    longest = max(len(prompt) + len(answer) for prompt, answer in tokens)
    if longest > limits.positions // 16 * 16 or max(max(*p, *a) for p, a in tokens) >= limits.vocab:
        raise ValueError(f"the models cannot read the tasks of {name}: too long, or other tokens")
    return of_examples(name, tokens, limits, edge)


def gym_set(name: str, tokenizer: Tokenizer, limits: Limits, seed: int, *, chat: bool) -> TestSet:
    """A data set of reasoning-gym: its questions, and its own answers taken as the right ones.

    Args:
      name: as reasoning-gym calls it.
      tokenizer: of the fine-tune.
      limits: how many; questions that are too long for the models are left out.
      seed: another one gives other questions.
      chat: each question is a user's message.

    Raises:
      ValueError: reasoning-gym is not installed, has no such data set, or no question fits.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "--gym needs reasoning-gym: pip install -c constraints.txt reasoning-gym"
        ) from None
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}; see its list of {len(DATASETS)}")
    room = limits.positions // 16 * 16
    tokens = []
    for item in reasoning_gym.create_dataset(name, size=limits.examples, seed=seed):
        if isinstance(item["answer"], str) and item["answer"]:
            question = item["question"] if chat else item["question"] + "\n"
            example = task_tokens(tokenizer, question, item["answer"], chat)
            ids = [*example[0], *example[1]]
            if len(ids) <= room and max(ids) < limits.vocab:
                tokens.append(example)
    if not tokens:
        raise ValueError(f"no question of {name} fits {room} tokens")
    return of_examples(name, tokens, limits, edge=False)
