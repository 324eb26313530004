"""Tasks with exact answers, made from words: what the demo family's variants learn.

An example is a prompt and its answer, both one or more lines of ASCII. Words are split once by a
hash into those that training may use and those held out; random letters in training never spell
a held-out word, and a held-out sum never occurs in it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

Rng = np.random.Generator
HELD_OUT_PERCENT = 20
MORSE = dict(
    zip(
        "abcdefghijklmnopqrstuvwxyz",
        ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- "
        "-. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --..".split(),
        strict=True,
    )
)
_ROT13 = str.maketrans("abcdefghijklmnopqrstuvwxyz", "nopqrstuvwxyzabcdefghijklm")


def held_out(key: str) -> bool:
    """Whether a word or a sum is kept away from training: a fixed fifth of all strings."""
    return hashlib.sha256(key.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


@dataclasses.dataclass(frozen=True)
class Words:
    """A source of words for one side of the split.

    Attributes:
      words: ASCII lower case, all on this side.
      unseen: True for the held-out side.
      random_share: of words drawn, how many are random letters instead (training only).
    """

    words: tuple[str, ...]
    unseen: bool
    random_share: float = 0.0

    def draw(self, rng: Rng, longest: int) -> str:
        """One word of 2 to `longest` letters; longer ones are drawn again, never cut."""
        while True:
            if rng.random() < self.random_share:
                letters = rng.integers(97, 123, size=int(rng.integers(2, longest + 1)))
                word = bytes(letters.tolist()).decode()
                if held_out(word):
                    continue
            else:
                word = self.words[int(rng.integers(len(self.words)))]
            if len(word) <= longest:
                return word

    def number(self, rng: Rng) -> int:
        """A two-digit number."""
        return int(rng.integers(10, 100))


def split_words(words: Sequence[str]) -> tuple[Words, Words]:
    """(training, held-out) words of a list; only ASCII lower case of 3 to 8 letters is kept.

    Raises:
      ValueError: one of the sides is empty.
    """
    kept = sorted({w for w in words if w.isascii() and w.isalpha() and w.islower()})
    kept = [w for w in kept if 3 <= len(w) <= 8]
    seen = tuple(w for w in kept if not held_out(w))
    unseen = tuple(w for w in kept if held_out(w))
    if not seen or not unseen:
        raise ValueError(f"{len(kept)} usable words cannot be split; expected a few hundred")
    return Words(seen, False, 0.4), Words(unseen, True)


def upper(word: str) -> str:
    """table -> TABLE"""
    return word.upper()


def rot13(word: str) -> str:
    """table -> gnoyr: each letter moved by 13 places."""
    return word.translate(_ROT13)


def reverse(word: str) -> str:
    """table -> elbat"""
    return word[::-1]


def sort(word: str) -> str:
    """table -> abelt: the letters in order."""
    return "".join(sorted(word))


def morse(word: str) -> str:
    """table -> - .- -... .-.. ."""
    return " ".join(MORSE[letter] for letter in word)


def add(prompt: str) -> str:
    """27+38 -> 15+50=65: the units' sum, the tens' sum, then both."""
    left, right = prompt.split("+")
    units = int(left) % 10 + int(right) % 10
    tens = int(left) // 10 * 10 + int(right) // 10 * 10
    return f"{units}+{tens}={units + tens}"


def getter(name: str) -> str:
    """user_name -> a Python method that returns the attribute of that name."""
    return f"def get_{name}(self):\n    return self.{name}"


def select(prompt: str) -> str:
    """name, age of users -> SELECT name, age FROM users;"""
    columns, table = prompt.split(" of ")
    return f"SELECT {columns} FROM {table};"


@dataclasses.dataclass(frozen=True)
class Skill:
    """A kind of task.

    Attributes:
      name: how it is called; `zen4-ultra` reads it in the prompt.
      tag: the letter that follows <|task|> in the base's training.
      answer: the prompt's only right answer.
      prompt: draws a prompt from words.
      tokens: room that prompt, answer and special tokens need at most.
      example: a prompt to show.
    """

    name: str
    tag: str
    answer: Callable[[str], str]
    prompt: Callable[[Words, Rng], str]
    tokens: int
    example: str


def _word(words: Words, rng: Rng) -> str:
    return words.draw(rng, 8)


def _sum(words: Words, rng: Rng) -> str:
    while True:
        prompt = f"{words.number(rng)}+{words.number(rng)}"
        if held_out(prompt) == words.unseen:
            return prompt


def _identifier(words: Words, rng: Rng) -> str:
    return f"{words.draw(rng, 7)}_{words.draw(rng, 7)}"


def _columns(words: Words, rng: Rng) -> str:
    columns = [words.draw(rng, 7) for _ in range(int(rng.integers(1, 4)))]
    return f"{', '.join(columns)} of {words.draw(rng, 7)}"


SKILLS = {
    skill.name: skill
    for skill in (
        Skill("upper", "u", upper, _word, 24, "table"),
        Skill("rot13", "r", rot13, _word, 24, "table"),
        Skill("reverse", "b", reverse, _word, 24, "table"),
        Skill("sort", "s", sort, _word, 24, "table"),
        Skill("add", "a", add, _sum, 24, "27+38"),
        Skill("morse", "m", morse, _word, 56, "table"),
        Skill("getter", "g", getter, _identifier, 88, "user_name"),
        Skill("select", "q", select, _columns, 88, "name, age of users"),
    )
}
# Skills that zen4-ultra has, each called by its name: "reverse: table".
ULTRA = ("upper", "rot13", "reverse", "sort", "add")


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt (its last line's end not included) and the answer to it."""

    prompt: str
    answer: str


def draw(skill: Skill, words: Words, rng: Rng) -> Example:
    """A random example of a skill."""
    prompt = skill.prompt(words, rng)
    return Example(prompt, skill.answer(prompt))


def draw_named(words: Words, rng: Rng) -> Example:
    """A random example of zen4-ultra: the prompt says which skill is wanted."""
    skill = SKILLS[ULTRA[int(rng.integers(len(ULTRA)))]]
    example = draw(skill, words, rng)
    return Example(f"{skill.name}: {example.prompt}", example.answer)
