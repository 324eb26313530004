"""Which tensors of a base and of several checkpoints belong together, and what comes out.

What does not match is an error that names it, unless a policy says what to do:

    vocabulary  refuse   an embedding or head with more rows than the base's is an error
                base     the merged model has the base's vocabulary; other rows are left out
                extra    rows that the base lacks are kept whole, as the mean of those who have them
    shapes      refuse   any other shape or tensor that differs is an error
                base     there the merged model has the base's tensor; who differs is left out

A vocabulary smaller than the base's is an error under every policy.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from zen_jax.checkpoint.hf import listed
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.source import Source
from zen_jax.config import ModelConfig
from zen_jax.layout import EMBED, HEAD
from zen_jax.pairs import FREE, same_setting

VocabularyPolicy = Literal["refuse", "base", "extra"]
ShapePolicy = Literal["refuse", "base"]


@dataclasses.dataclass(frozen=True)
class Policies:
    """What to do with what does not match; see the module."""

    vocabulary: VocabularyPolicy = "refuse"
    shapes: ShapePolicy = "refuse"

    def __post_init__(self) -> None:
        for name, allowed in (("vocabulary", VocabularyPolicy), ("shapes", ShapePolicy)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(f"{name} is {value!r}; expected one of {get_args(allowed)}")


@dataclasses.dataclass(frozen=True)
class Item:
    """One tensor of the merged model.

    Attributes:
      name: what it is called.
      shape: it gets.
      base: the base's tensor that deltas are taken to; None for a head where the base is tied:
        what the base lacks has no delta.
      models: each checkpoint's tensor, or None where it is left out.
    """

    name: str
    shape: tuple[int, ...]
    base: str | None
    models: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Pairing:
    """All tensors of a merged model.

    Attributes:
      config: of the merged model.
      items: by name, in order.
      widest: the checkpoint whose vocabulary is the largest beyond the base's; None if none is.
      notes: what the policies decided, one line each.
    """

    config: ModelConfig
    items: Mapping[str, Item]
    widest: int | None
    notes: tuple[str, ...]


def pair(base: Source, models: Sequence[Source], policies: Policies) -> Pairing:
    """Pairs the tensors of a base and of its fine-tunes.

    Raises:
      SourceError: something does not match and no policy says what to do; all of it is named.
    """
    problems: list[str] = []
    notes: list[str] = []
    untied = any(HEAD in source.tensors for source in (base, *models))
    names = [name for name in base.tensors if name != HEAD] + [HEAD] * untied
    rows = _vocabulary(base, models, policies, problems)
    for model in models:
        _compare_settings(base, model, policies, problems, notes)
        strange = sorted(set(model.tensors) - set(base.tensors) - {HEAD})
        if strange:
            text = f"{model.name} has {listed(strange)}, which the base lacks"
            (notes if policies.shapes == "base" else problems).append(text)
    items = {}
    for name in sorted(names):
        shape = base.tensors[_own(base, name)].shape
        found = tuple(_counterpart(base, m, name, policies, problems, notes) for m in models)
        if name in (EMBED, HEAD):
            shape = (rows, *shape[1:])
        items[name] = Item(name, shape, name if name in base.tensors else None, found)
    if problems:
        raise SourceError(f"cannot be merged with {base.name}", problems)
    widths = [_rows(model) for model in models]
    widest = widths.index(rows) if rows > _rows(base) else None
    config = dataclasses.replace(
        base.config, vocab_size=rows, tie_word_embeddings=HEAD not in items
    )
    return Pairing(config, items, widest, tuple(notes))


def _own(source: Source, name: str) -> str:
    """A source's tensor of a name; the head of a tied one is its embedding."""
    return EMBED if name == HEAD and HEAD not in source.tensors else name


def _rows(source: Source) -> int:
    return source.tensors[EMBED].shape[0]


def _vocabulary(
    base: Source, models: Sequence[Source], policies: Policies, problems: list[str]
) -> int:
    """Rows of the merged embedding."""
    mine = _rows(base)
    for model in models:
        its = model.tensors[EMBED].shape
        told = f"{EMBED} of {model.name} has shape {its}; the base's is {(mine, *its[1:])}"
        if its[0] < mine:
            problems.append(f"{told}, and a smaller vocabulary is not supported")
        elif its[0] > mine and policies.vocabulary == "refuse":
            problems.append(f"{told}; choose --vocabulary base or extra")
    if policies.vocabulary != "extra":
        return mine
    return max(mine, *(_rows(model) for model in models))


def _counterpart(
    base: Source,
    model: Source,
    name: str,
    policies: Policies,
    problems: list[str],
    notes: list[str],
) -> str | None:
    """A model's tensor of a name, None where policies leave it out."""
    mine = base.tensors[_own(base, name)].shape
    found = _own(model, name)
    if found not in model.tensors:
        text = f"{model.name} lacks {name}, which the base has"
    else:
        its = model.tensors[found].shape
        if its == mine or (name in (EMBED, HEAD) and its[1:] == mine[1:]):
            return found
        text = f"{name} of {model.name} has shape {its}; the base's is {mine}"
    (notes if policies.shapes == "base" else problems).append(text)
    return None


def _compare_settings(
    base: Source, model: Source, policies: Policies, problems: list[str], notes: list[str]
) -> None:
    """Settings that decide what weights mean have to be the base's."""
    for field in dataclasses.fields(ModelConfig):
        mine, its = getattr(base.config, field.name), getattr(model.config, field.name)
        if field.name in FREE or same_setting(field.name, mine, its):
            continue
        text = f"config.json of {model.name} gives {field.name} {its!r}; the base has {mine!r}"
        (notes if policies.shapes == "base" else problems).append(text)
