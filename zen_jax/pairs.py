"""A base and what claims to be its fine-tune: which tensors belong together, whether they do."""

import contextlib
import dataclasses
from collections.abc import Sequence

from zen_jax.checkpoint.manifest import Manifest
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.source import Source
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.delta.kinship import FARTHEST, FEWEST_SIGNS, Kinship, compare, together
from zen_jax.layout import EMBED, HEAD

# A variant may differ from its base in these settings; the others decide what its weights mean.
FREE = ("vocab_size", "tie_word_embeddings", "max_position")
# Mistral's layout is Llama's; GGUF files do not tell them apart, and windows are compared anyway.
_SAME_AS = {"mistral": "llama"}
# Matrices that are looked at before all of them are converted.
_SAMPLED = 16


class Unrelated(SourceError):
    """A checkpoint of the base's architecture whose weights have nothing to do with the base's."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor of a fine-tune and the base's that it is a difference to.

    Attributes:
      name: what the variant calls it.
      tuned: its name in the fine-tune.
      base: its name in the base.
    """

    name: str
    tuned: str
    base: str


def pair_up(tuned: Source, base: Manifest | Source) -> list[Pair]:
    """Every tensor that a variant keeps, the head too as soon as either side has one of its own."""
    pairs = [Pair(name, name, name) for name in sorted(tuned.tensors) if name != HEAD]
    mine, its = HEAD in tuned.tensors, HEAD in base.tensors
    if mine or its:
        pairs.append(Pair(HEAD, HEAD if mine else EMBED, HEAD if its else EMBED))
    return pairs


def tells(pair: Pair) -> bool:
    """Whether a matrix tells if the models belong together: those of layers do. An embedding may
    be shared by models that do not, and be made anew in one that does."""
    return pair.name not in (EMBED, HEAD)


def check_architecture(source: Source, base: Manifest | Source) -> None:
    """Makes sure that a source is of the base's architecture.

    Raises:
      SourceError: it is not; each tensor and setting that differs is named with both values.
    """
    problems = []
    for pair in pair_up(source, base):
        if pair.base not in base.tensors:
            problems.append(f"{pair.name} has no counterpart in the base")
            continue
        mine, its = source.tensors[pair.tuned].shape, base.tensors[pair.base].shape
        if mine == its:
            continue
        rows = pair.name in (EMBED, HEAD) and mine[1:] == its[1:]
        if rows and mine[0] > its[0]:
            continue
        hint = ", and a smaller vocabulary is not supported" if rows else ""
        problems.append(f"{pair.name} has shape {mine}; the base's is {its}{hint}")
    lacking = sorted(set(base.tensors) - set(source.tensors) - {HEAD})
    problems += [f"lacks {name}, which the base has" for name in lacking]
    for field in dataclasses.fields(ModelConfig):
        mine, its = getattr(source.config, field.name), getattr(base.config, field.name)
        if field.name not in FREE and not same_setting(field.name, mine, its):
            problems.append(f"config.json gives {field.name} {mine!r}; the base has {its!r}")
    if problems:
        raise SourceError(f"{source.name} is no fine-tune of this base", problems)


def same_setting(field: str, one: object, other: object) -> bool:
    """Whether two values of a field of `ModelConfig` mean the same."""
    if field == "family":
        return _SAME_AS.get(str(one), one) == _SAME_AS.get(str(other), other)
    return one == other


def look_at(source: Source, store: Store, pairs: Sequence[Pair]) -> Kinship | None:
    """Figures of a few matrices, spread over the model; None if there is none to go by.

    Args:
      source: of the base's architecture.
      store: with the base.
      pairs: of all tensors.

    Raises:
      SourceError, BaseCorrupt: a file is damaged.
    """
    matrices = [
        pair for pair in pairs if tells(pair) and len(source.tensors[pair.tuned].shape) == 2
    ]
    step = max(1, -(-len(matrices) // _SAMPLED))
    found = []
    for pair in matrices[::step]:
        base, tuned = store.base_tensor(pair.base), source.read(pair.tuned)
        with contextlib.suppress(ValueError):  # conversion names what is not finite
            found.append(compare(base, tuned[: base.shape[0]]))
    return together(found) if found else None


def check_kinship(name: str, figures: Kinship | None) -> None:
    """Makes sure that a source's weights come from the base's.

    Raises:
      Unrelated: they do not; the figures are named beside their limits.
    """
    if figures is None or not figures.unrelated:
        return
    raise Unrelated(
        f"{name} is no fine-tune of this base",
        f"{figures}; a fine-tune differs by at most {FARTHEST} or keeps at least "
        f"{FEWEST_SIGNS:.0%} of signs. See which base it was made from, or use --force",
    )
