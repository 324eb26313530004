"""The models that are compared, each read when its turn comes, one in memory at a time."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from zen_jax.checkpoint.source import Source
from zen_jax.config import ModelConfig
from zen_jax.engine import place_params
from zen_jax.layout import HEAD, Params, fuse, tensor_shapes
from zen_jax.merge.sources import StoreSource, open_member
from zen_jax.pairs import Pair, check_architecture, pair_up
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.format_study.formats import FORMATS, Format

Kind = Literal["base", "tuned", "delta", "option"]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Attributes:
      config: its own architecture.
      params: on the device; a checkpoint's in its own dtype, a variant's in float32.
      nbytes: what is stored of it.
    """

    config: ModelConfig
    params: Params
    nbytes: int


class Whole:
    """A checkpoint, a store's base, or one of its variants added up with it."""

    def __init__(self, source: Source) -> None:
        """Takes what is opened."""
        self.source = source

    def load(self) -> Loaded:
        """Reads it, a tensor at a time.

        Raises:
          ValueError: a file is damaged.
        """
        source = self.source
        tensors = {name: source.read(name) for name in tensor_shapes(source.config)}
        if isinstance(source, StoreSource):
            nbytes = source.bytes_on_disk
        else:
            nbytes = sum(tensor.size for tensor in source.tensors.values())
        return Loaded(source.config, _placed(source.config, tensors), nbytes)


class Formatted:
    """What a format of deltas gives back of a fine-tune, without a store: an option to compare."""

    def __init__(self, base: Source, tuned: Source, chosen: Format) -> None:
        """Takes both, and what is made of them."""
        self.source = tuned
        self._base, self._tuned, self._format = base, tuned, chosen

    def load(self) -> Loaded:
        """Takes the fine-tune through the format, a tensor at a time; all float32.

        Raises:
          ValueError: a file is damaged.
        """
        tensors: dict[str, np.ndarray] = {}
        nbytes = 0
        for pair in pair_up(self._tuned, self._base):
            tensors[pair.name], taken = self._tensor(pair)
            nbytes += taken
        untied = dataclasses.replace(self._tuned.config, tie_word_embeddings=HEAD not in tensors)
        return Loaded(untied, _placed(untied, tensors), nbytes)

    def _tensor(self, pair: Pair) -> tuple[np.ndarray, int]:
        """What the format gives back of a tensor, and its bytes; rows that the base lacks are kept
        whole, as in a store."""
        start, end = self._base.read(pair.base), self._tuned.read(pair.tuned)
        rest = end[start.shape[0] :].astype(np.float32)
        codec = self._format.codec(pair.name, start)
        value, nbytes = codec(start, end[: start.shape[0]])
        if not rest.size:
            return value, nbytes
        return np.concatenate([value, rest]), nbytes + end.itemsize * rest.size


def _placed(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    return place_params(config, fuse(config, tensors))


@dataclasses.dataclass(frozen=True)
class Member:
    """A model that takes part.

    Attributes:
      name: in the results; no two have the same.
      kind: its part.
      model: how it comes into memory.
    """

    name: str
    kind: Kind
    model: Whole | Formatted


@dataclasses.dataclass(frozen=True)
class Cast:
    """All that are compared.

    Attributes:
      members: the fine-tune first, if there is one, then the base, then the others.
      tokenizer: the fine-tune's, else the first variant's, else the base's.
    """

    members: Sequence[Member]
    tokenizer: Tokenizer

    @property
    def vocab(self) -> int:
        """The tokens that all have: all distributions are over these."""
        return min(member.model.source.config.vocab_size for member in self.members)

    @property
    def positions(self) -> int:
        """The longest sequence that all can read."""
        return min(member.model.source.config.max_position for member in self.members)

    @property
    def has_tuned(self) -> bool:
        """Whether there is a fine-tune to compare with."""
        return self.members[0].kind == "tuned"


def open_cast(base: str, tuned: str | None, models: Sequence[str], options: Sequence[str]) -> Cast:
    """Opens all models and checks that they belong together; no tensor is read.

    Args:
      base: as `zen_jax.merge.sources.open_member` takes it, like `tuned` and `models`.
      tuned: the fine-tune at full precision; None leaves out what needs it.
      models: variants in stores, or other checkpoints of the same shape.
      options: names of `FORMATS`, made of base and fine-tune on the way.

    Raises:
      ValueError: a model is not there or is damaged, has another shape than the base, an option is
        unknown or lacks a fine-tune, or two have one name.
    """
    unknown = sorted(set(options) - set(FORMATS))
    if unknown:
        raise ValueError(
            f"no option is called {', '.join(unknown)}; there are {', '.join(FORMATS)}"
        )
    if options and tuned is None:
        raise ValueError("an option is made of base and fine-tune; say --tuned too")
    start = open_member(base)
    members = [Member("base", "base", Whole(start))]
    end = None if tuned is None else open_member(tuned)
    if end is not None:
        check_architecture(end, start)
        members.insert(0, Member("fine-tune", "tuned", Whole(end)))
    for text in models:
        source = open_member(text)
        check_architecture(source, start)
        members.append(Member(_name_of(text, source), "delta", Whole(source)))
    if end is not None:
        for name in options:
            members.append(Member(name, "option", Formatted(start, end, FORMATS[name])))
    names = [member.name for member in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two models are called {', '.join(twice)}; each needs a name of its own")
    return Cast(members, tokenizer_of([m.model.source for m in _speakers(members)]))


def _speakers(members: Sequence[Member]) -> Iterator[Member]:
    """Whose tokenizer is asked for, in order."""
    for kind in ("tuned", "delta", "base"):
        yield from (member for member in members if member.kind == kind)


def _name_of(text: str, source: Source) -> str:
    """What a model is called: a variant by its name, anything else as its source is."""
    _, _, variant = text.partition(":")
    return variant if isinstance(source, StoreSource) and variant else source.name


def tokenizer_of(sources: Sequence[Source]) -> Tokenizer:
    """The first tokenizer that one of them has.

    Raises:
      ValueError: none has one, or it is damaged.
    """
    for source in sources:
        files = source.tokenizer_files()
        if "tokenizer.json" in files:
            return Tokenizer.from_files(files)
    raise ValueError("no model has a tokenizer.json; put one beside the fine-tune or the base")
