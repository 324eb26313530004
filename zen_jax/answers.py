"""Prompts answered in one process, each in a row of an engine."""

import dataclasses
import secrets
from collections.abc import Sequence

import numpy as np

from zen_jax.answer_text import AnswerText
from zen_jax.delta.bank import DeltaBank
from zen_jax.engine import Engine
from zen_jax.engine_state import Chunk, DecodeState
from zen_jax.logprobs import Fetched
from zen_jax.sampling import SamplingParams, TokenLogprobs
from zen_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer, or one of several samples of it.

    Attributes:
      text: without special tokens.
      token_ids: as they were chosen, the end token included.
      reason: "stop" after an end token or at a stop string, "length" at max_tokens or the end of
        the context.
      seed: what the answer was drawn with.
      matched: the end token or the stop string, or None.
      logprobs: one for each token, where asked for.
      prompt_logprobs: one for each token of the prompt, where asked for, of the first sample.
    """

    text: str
    token_ids: tuple[int, ...]
    reason: str
    seed: int
    matched: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass
class Answer:
    """One sample of one prompt's answer on its way.

    Attributes:
      prompt: its tokens.
      sampling: validated.
      seed: 0 to 2**64 - 1.
      sample: its number.
      ends: tokens that end it.
      limit: the most tokens to make.
      reader: makes text of its tokens.
    """

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    sample: int
    ends: frozenset[int]
    limit: int
    reader: AnswerText
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def matched(self) -> int | str | None:
        """What ended it: a token, or a stop string."""
        last = self.tokens[-1] if self.tokens else None
        return last if last in self.ends else self.reader.matched

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return self.matched is not None or len(self.tokens) >= self.limit

    @property
    def judges(self) -> bool:
        """Whether the prompt's tokens get log-probabilities: with the first sample."""
        return self.sampling.prompt_logprobs is not None and self.sample == 0

    def add(self, token: int, logprobs: Fetched | None, at: tuple[int, int]) -> None:
        """Takes the next token, and its log-probabilities at a place of what was fetched."""
        self.tokens.append(token)
        if token not in self.ends:
            self.text += self.reader.push(token)
        if logprobs is not None and self.sampling.logprobs is not None:
            self.logprobs.append(logprobs.of(token, at, self.sampling.logprobs))

    def generation(self) -> Generation:
        """The answer, once it is done."""
        return Generation(
            self.text + self.reader.flush(),
            tuple(self.tokens),
            "length" if self.matched is None else "stop",
            self.seed,
            self.matched,
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
        )


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Makes sure that prompts of tokens fit, with an answer of one token at least.

    Raises:
      ValueError: one is empty or too long.
    """
    for prompt in prompts:
        if not 1 <= len(prompt) < max_length:
            raise ValueError(f"a prompt has {len(prompt)} tokens; expected 1 to {max_length - 1}")


def answer_prompts(
    engine: Engine,
    bank: DeltaBank,
    slot: int,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
) -> list[list[Generation]]:
    """All samples of each prompt's answer, as many at once as the engine has rows.

    Args:
      engine: its rows are all used.
      bank: the resident variants.
      slot: whose answers they are, -1 for the base.
      tokenizer: of that model.
      prompts: tokens.
      sampling: validated; without a seed one is drawn for each prompt.

    Raises:
      ValueError: a prompt is empty or too long.
    """
    longest = engine.sizes.max_length
    check_prompts(prompts, longest)
    own = frozenset() if sampling.ignore_eos else tokenizer.eos_ids
    ends = own | set(sampling.stop_token_ids)

    def begin(prompt: list[int], seed: int, sample: int) -> Answer:
        text = AnswerText(tokenizer, sampling.stop, sampling.min_tokens)
        limit = min(sampling.max_tokens, longest - len(prompt))
        return Answer(prompt, sampling, seed, sample, ends, limit, text)

    answers = [
        [begin(prompt, seed, sample) for sample in range(sampling.n)]
        for prompt, seed in ((prompt, _seed(sampling)) for prompt in prompts)
    ]
    answer_all(engine, bank, slot, [answer for samples in answers for answer in samples])
    return [[answer.generation() for answer in samples] for samples in answers]


def _seed(sampling: SamplingParams) -> int:
    return secrets.randbits(64) if sampling.seed is None else sampling.seed


def answer_all(engine: Engine, bank: DeltaBank, slot: int, answers: Sequence[Answer]) -> None:
    """Decodes all answers, a row each.

    Args:
      engine: its rows are all used.
      bank: the resident variants.
      slot: whose answers they are, -1 for the base.
      answers: not begun.
    """
    state = engine.init_state()
    waiting = list(reversed(answers))
    rows: dict[int, Answer] = {}
    free = list(range(engine.sizes.rows))
    while waiting or rows:
        while waiting and free:
            answer, row = waiting.pop(), free.pop()
            state = _enter(engine, bank, state, row, slot, answer)
            if answer.done:
                free.append(row)
            else:
                rows[row] = answer
        if rows:
            state = _decode(engine, bank, state, rows)
        for row in [row for row, answer in rows.items() if answer.done]:
            del rows[row]
            free.append(row)


def _enter(
    engine: Engine, bank: DeltaBank, state: DecodeState, row: int, slot: int, answer: Answer
) -> DecodeState:
    """Reads an answer's prompt into a row and chooses the first token."""
    whole = Chunk(
        row,
        slot,
        answer.prompt,
        sampling=answer.sampling,
        seed=answer.seed,
        sample_index=answer.sample,
        stops=sorted(answer.ends),
        end=len(answer.prompt) + answer.limit,
        targets=answer.prompt[1:] if answer.judges else (),
    )
    if answer.judges:
        answer.prompt_logprobs.append(TokenLogprobs(answer.prompt[0], None))
    for part in whole.cut(max(t for _, t in engine.sizes.shapes)):
        state, sampled = engine.prefill(bank, state, [part])
        if part.targets:
            top = answer.sampling.prompt_logprobs
            assert sampled.prompt is not None and top is not None
            read = Fetched(sampled.prompt, np.shape(sampled.prompt.own))
            answer.prompt_logprobs += [read.of(t, (0, i), top) for i, t in enumerate(part.targets)]
        if part.last:
            token = np.asarray(sampled.token)
            asked = answer.sampling.logprobs is not None
            own = Fetched(sampled.logprobs, (1, token.size)) if asked else None
            answer.add(int(token[0]), own, (0, 0))
    return state


def _decode(
    engine: Engine, bank: DeltaBank, state: DecodeState, rows: dict[int, Answer]
) -> DecodeState:
    """Makes some steps over the rows."""
    left = max(answer.limit - len(answer.tokens) for answer in rows.values())
    steps = min(left, engine.sizes.max_steps)
    state, sampled = engine.decode(bank, state, steps, list(rows))
    tokens = np.asarray(sampled.token)
    asked = any(answer.sampling.logprobs is not None for answer in rows.values())
    logprobs = Fetched(sampled.logprobs, tokens.shape) if asked else None
    for step in range(steps):
        for row, answer in rows.items():
            if not answer.done:
                answer.add(int(tokens[step, row]), logprobs, (step, row))
    return state
