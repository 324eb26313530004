"""A bridge to lm-evaluation-harness (EleutherAI, package lm-eval, optional): its three questions
answered by any model that `zen eval` takes.

    import lm_eval
    from zen_jax.evaluation.harness import open_for_harness

    lm_eval.simple_evaluate(model=open_for_harness("STORE:my-variant"), tasks=["arc_easy"])

The harness brings tasks and, from its hub, their data; neither is here. `HarnessModel` answers what
its class `lm_eval.api.model.LM` asks, and knows nothing of it.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from zen_jax.answers import answer_prompts
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import BASE_SLOT, Engine, EngineConfig
from zen_jax.evaluate import Example
from zen_jax.evaluation.members import Loaded, Whole, tokenizer_of
from zen_jax.evaluation.questions import Limits
from zen_jax.evaluation.scoring import score
from zen_jax.evaluation.sheet import Sheet
from zen_jax.merge.sources import open_member
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer

_MAX_TOKENS = 256  # as the harness's own models have it
_LONGEST = 2048
# Settings of a request for text that are called so here too.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Asked(Protocol):
    """A request of the harness: `lm_eval.api.instance.Instance`."""

    @property
    def args(self) -> tuple[Any, ...]:
        """What is asked."""
        ...


class HarnessModel:
    """A model that answers the harness."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer, rows: int = 8) -> None:
        """Takes a model in memory.

        Args:
          loaded: the model.
          tokenizer: its own.
          rows: texts that are generated at once.

        Raises:
          ValueError: the tokenizer has neither a begin nor an end, so nothing can stand before the
            first token of a text.
        """
        super().__init__()
        self._loaded, self._tokenizer, self._rows = loaded, tokenizer, rows
        ends = sorted(tokenizer.eos_ids)
        self._start = tokenizer.encode("a")[: -len(tokenizer.encode("a", add_bos=False))]
        if not self._start and not ends:
            raise ValueError("the tokenizer has no begin and no end to put before a text")
        self._prefix = [*self._start, *ends][:1]
        positions = min(loaded.config.max_position, _LONGEST)
        self._length = positions - positions % 16
        self._limits = Limits(loaded.config.vocab_size, positions)

    def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the continuation's log-likelihood in nats after the
        context, and whether greedy decoding gives it.

        Spaces at the end of a context belong to the continuation, and both are made tokens
        together, as in the harness's own models. What is too long loses its beginning.
        """
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
        """For each (text,): the log-likelihood of all of it in nats, each token predicted once
        after as much as fits before it in windows that follow one another."""
        texts = [self._tokenizer.encode(request.args[0], add_bos=False) for request in requests]
        windows = [self._windows(ids) for ids in texts]
        scores = iter(self._score([window for text in windows for window in text]))
        return [sum((next(scores)[0] for _ in text), 0.0) for text in windows]

    def generate_until(self, requests: Sequence[Asked]) -> list[str]:
        """For each (context, settings): what follows, up to the first of `until`.

        Settings are `until`, `max_gen_toks`, `do_sample`, `temperature`, `top_p`, `top_k` and
        `min_p`. A context that is too long loses its beginning.

        Raises:
          ValueError: a setting is unknown or out of range.
        """
        answers: dict[int, str] = {}
        groups: dict[str, tuple[SamplingParams, list[int]]] = {}
        for i, request in enumerate(requests):
            sampling = _sampling(dict(request.args[1]))
            groups.setdefault(repr(sampling), (sampling, []))[1].append(i)
        for sampling, members in groups.values():
            room = max(1, self._length - sampling.max_tokens)
            prompts = [self._context(requests[i].args[0])[-room:] for i in members]
            bank = self._engine.init_bank()
            found = answer_prompts(
                self._engine, bank, BASE_SLOT, self._tokenizer, prompts, sampling
            )
            answers |= {i: samples[0].text for i, samples in zip(members, found, strict=True)}
        return [answers[i] for i in range(len(requests))]

    @functools.cached_property
    def _engine(self) -> Engine:
        schema = BankSchema.covering(self._loaded.config, 1)
        return Engine(self._loaded.params, EngineConfig(self._rows, self._length), schema)

    def _context(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else list(self._prefix)

    def _pair(self, context: str, continuation: str) -> Example:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before = self._context(kept)
        if not kept:
            return before, self._tokenizer.encode(continuation, add_bos=False)
        whole = self._tokenizer.encode(kept + continuation)
        return before, whole[len(before) :]

    def _windows(self, ids: list[int]) -> list[Example]:
        """What comes before and what is predicted; a row's first token is never predicted."""
        size = self._length - 1
        windows: list[Example] = []
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            # The last window is filled up with what comes before it.
            begin = max(0, at + len(part) - size - 1)
            windows.append((ids[begin:at] if at else self._prefix, part))
        return windows

    def _score(self, examples: Sequence[Example]) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        groups: dict[int, list[int]] = {}
        cut = [_cut(example, self._length) for example in examples]
        for i, (before, after) in enumerate(cut):
            if not after:
                found[i] = (0.0, True)
                continue
            size = 16
            while size < len(before) + len(after):
                size *= 2
            groups.setdefault(min(size, self._length), []).append(i)
        for size, members in groups.items():
            batch = self._limits.batch(len(members), size)
            sheet = Sheet.of_examples([cut[i] for i in members], batch, size)
            rows = score(self._loaded.config, self._loaded.params, sheet)
            found |= {
                i: (-float(nll), bool(right))
                for i, nll, right in zip(members, rows.nll, rows.right, strict=True)
            }
        return [found[i] for i in range(len(examples))]


def _cut(example: Example, length: int) -> Example:
    """At most `length` tokens: what is first goes first, but for one token of context."""
    before, after = list(example[0]), list(example[1])
    if len(after) >= length:
        before, after = [*before, *after][-length:][:1], after[1 - length :]
    return before[-(length - len(after)) :], after


def _sampling(settings: dict[str, Any]) -> SamplingParams:
    until = settings.pop("until", ())
    stop = (until,) if isinstance(until, str) else tuple(until or ())
    most = int(settings.pop("max_gen_toks", _MAX_TOKENS))
    sample = settings.pop("do_sample", None)
    unknown = sorted(set(settings) - set(_SAMPLING))
    if unknown:
        raise ValueError(
            f"generate_until has {', '.join(unknown)}; known are until, max_gen_toks, "
            f"do_sample, {', '.join(_SAMPLING)}"
        )
    given = {name: value for name, value in settings.items() if value is not None}
    given.setdefault("temperature", 1.0 if sample else 0.0)
    if sample is False:
        given["temperature"] = 0.0
    sampling = SamplingParams(max_tokens=most, stop=tuple(s for s in stop if s), **given)
    sampling.validate()
    return sampling


def open_for_harness(text: str, rows: int = 8) -> Any:
    """A model as the harness takes it: `lm_eval.simple_evaluate(model=open_for_harness(...))`.

    Args:
      text: a folder, a GGUF file, a store (its base), or STORE:NAME[:VERSION].
      rows: texts that are generated at once.

    Returns:
      An instance of `lm_eval.api.model.LM`.

    Raises:
      ValueError: there is no such model, or lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "the harness is not installed: pip install -c constraints.txt lm-eval"
        ) from None
    model = Whole(open_member(text))
    kind = type("ZenLM", (HarnessModel, LM), {})
    return kind(model.load(), tokenizer_of([model.source]), rows)
