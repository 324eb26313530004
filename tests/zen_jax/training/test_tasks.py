"""Tasks: answers are right, and what is held out never reaches training."""

import numpy as np
import pytest

from zen_jax.training import tasks
from zen_jax.training.batches import example_batch
from zen_jax.training.recipe import VARIANTS, draw_example
from zen_jax.training.tasks import SKILLS, Words

ANSWERS = [
    ("upper", "table", "TABLE"),
    ("rot13", "table", "gnoyr"),
    ("reverse", "table", "elbat"),
    ("sort", "table", "abelt"),
    ("morse", "sos", "... --- ..."),
    ("add", "27+38", "15+50=65"),
    ("add", "99+10", "9+100=109"),
    ("getter", "user_name", "def get_user_name(self):\n    return self.user_name"),
    ("select", "name, age of users", "SELECT name, age FROM users;"),
]


@pytest.mark.parametrize(("skill", "prompt", "answer"), ANSWERS)
def test_answers(skill: str, prompt: str, answer: str) -> None:
    assert SKILLS[skill].answer(prompt) == answer


def test_the_getter_is_python() -> None:
    scope: dict[str, object] = {}
    exec(tasks.getter("user_name"), scope)
    assert callable(scope["get_user_name"])


def test_rot13_twice_is_the_word() -> None:
    assert tasks.rot13(tasks.rot13("prosaic")) == "prosaic"


def test_words_are_split_once(words: tuple[Words, Words]) -> None:
    seen, unseen = words
    assert not set(seen.words) & set(unseen.words)
    assert all(tasks.held_out(word) for word in unseen.words)
    share = len(unseen.words) / (len(seen.words) + len(unseen.words))
    assert share == pytest.approx(tasks.HELD_OUT_PERCENT / 100, abs=0.03)


def test_words_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="1 usable words"):
        tasks.split_words(["table", "UPPER", "naïve", "it", "don't", "incomprehensible"])


def _pieces(prompt: str) -> list[str]:
    """The words, or the sum, that a prompt holds."""
    inner = prompt.partition(": ")[2] or prompt
    if "+" in inner:
        return [inner]
    return inner.replace(",", "").replace(" of ", " ").replace("_", " ").split()


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.skill])
def test_training_and_held_out_inputs_are_disjoint(name: str, words: tuple[Words, Words]) -> None:
    rng = np.random.default_rng(1)
    for side, unseen in zip(words, (False, True), strict=True):
        for _ in range(300):
            for piece in _pieces(draw_example(VARIANTS[name], side, rng).prompt):
                assert tasks.held_out(piece) == unseen, piece


def test_random_letters_reach_training_only(words: tuple[Words, Words]) -> None:
    rng = np.random.default_rng(2)
    seen, unseen = words
    assert any(seen.draw(rng, 8) not in seen.words for _ in range(50))
    assert all(unseen.draw(rng, 8) in unseen.words for _ in range(50))


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.skill])
def test_examples_fit_their_batches(name: str) -> None:
    variant = VARIANTS[name]
    longest = Words(("w" * 8, "w" * 7), False)
    rng = np.random.default_rng(3)
    example_batch([(draw_example(variant, longest, rng), ()) for _ in range(200)], variant.length)


@pytest.mark.parametrize("skill", SKILLS.values(), ids=lambda skill: skill.name)
def test_every_skill_draws_its_own_example(skill: tasks.Skill, words: tuple[Words, Words]) -> None:
    rng = np.random.default_rng(4)
    example = tasks.draw(skill, words[0], rng)
    assert example.answer == skill.answer(example.prompt)
    again = tasks.draw(skill, words[0], np.random.default_rng(4))
    assert again == example
