"""What a request asks of the choice of its tokens, checked. The choice is `zen_jax.sampler`'s."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

# The most of each that a request may ask for.
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64


class InvalidSampling(ValueError):
    """A sampling field is out of range; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model held a token: natural logarithms, by the raw logits.

    Attributes:
      token_id: the token.
      logprob: its own; None for the first token of a prompt, which nothing predicts.
      top_ids: the likeliest tokens, as many as were asked for, the likeliest first.
      top_logprobs: theirs.
    """

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request asks for.

    Attributes:
      max_tokens: the most tokens to generate, at least 1.
      temperature: divides the logits; below 1e-5 greedy; at most 100.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the least set of likeliest tokens whose probability reaches this, in (0, 1].
      seed: 0 to 2**64 - 1; None lets the server choose one.
      stop_token_ids: end after one of these, beside the model's own end tokens.
      ignore_eos: go on after the model's own end tokens.
      min_p: keep tokens of at least this share of the likeliest one's probability, in [0, 1].
      repetition_penalty: of tokens that stand in prompt or answer, divides positive logits and
        multiplies others, in [0.01, 100]; 1 is none.
      presence_penalty: taken off the logits of tokens in the answer, in [-2, 2].
      frequency_penalty: the same, times how often they stand there.
      logit_bias: token -> what is added to its logit, in [-100, 100].
      min_tokens: no stop token is chosen, and no stop string counts, in the first so many tokens.
      stop: texts that end the answer in front of them.
      n: samples of the answer, each with random numbers of its own.
      logprobs: log-probabilities of each token, and of so many likeliest ones; None for neither.
      prompt_logprobs: the same of the prompt's tokens.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether it matters which tokens stand in prompt and answer."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def validate(self, vocab_size: int | None = None) -> None:
        """Checks every field.

        Args:
          vocab_size: V, to check token ids against.

        Raises:
          InvalidSampling: naming the first field at fault, its value and what was expected.
        """
        for error in self.problems(vocab_size):
            raise error

    def problems(self, vocab_size: int | None = None) -> Iterator[InvalidSampling]:
        """What `validate` would say of every field.

        Args:
          vocab_size: V, to check token ids against.
        """
        most = (vocab_size or 2**31) - 1
        checks = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) to 100"),
            ("top_k", self.top_k >= -1, "1 or more, or 0 or -1 to keep all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "0.01 to 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            (
                "min_tokens",
                0 <= self.min_tokens <= max(self.max_tokens, 0),
                f"0 to max_tokens, {self.max_tokens}",
            ),
            ("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
            *(
                (name, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
                for name, value in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
        )
        for field, good, expected in checks:
            if not good:
                yield InvalidSampling(field, f"is {getattr(self, field)}; expected {expected}")
        yield from _of_stops(self.stop_token_ids, self.stop, most)
        yield from _of_biases(self.logit_bias, most)


def _of_stops(ids: Sequence[int], texts: Sequence[str], most: int) -> Iterator[InvalidSampling]:
    """What is wrong with stop tokens and stop strings; `most` is the highest token id."""
    if len(ids) > MAX_STOP_IDS:
        yield InvalidSampling("stop_token_ids", f"are {len(ids)}; expected {MAX_STOP_IDS} at most")
        ids = ()
    for i, token in enumerate(ids):
        if not 0 <= token <= most:
            text = f"is {token}; expected token ids, 0 to {most}"
            yield InvalidSampling(f"stop_token_ids[{i}]", text)
            break
    if len(texts) > MAX_STOPS:
        yield InvalidSampling("stop", f"has {len(texts)} strings; expected {MAX_STOPS} at most")
        texts = ()
    for i, text in enumerate(texts):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            yield InvalidSampling(f"stop[{i}]", "has a lone surrogate; expected valid Unicode")
            continue
        if not 1 <= size <= MAX_STOP_BYTES:
            expected = f"expected 1 to {MAX_STOP_BYTES}"
            yield InvalidSampling(f"stop[{i}]", f"has {size} bytes in UTF-8; {expected}")


def _of_biases(biases: Mapping[int, float], most: int) -> Iterator[InvalidSampling]:
    """What is wrong with logit_bias; `most` is the highest token id."""
    if len(biases) > MAX_BIASES:
        text = f"has {len(biases)} entries; expected {MAX_BIASES} at most"
        yield InvalidSampling("logit_bias", text)
        return
    for token, bias in biases.items():
        if not 0 <= token <= most:
            text = f"has the key {token}; expected token ids, 0 to {most}"
            yield InvalidSampling("logit_bias", text)
            return
        if not -100.0 <= bias <= 100.0:
            yield InvalidSampling(f"logit_bias[{token}]", f"is {bias}; expected -100 to 100")
            return
