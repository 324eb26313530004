"""The formats that are compared: which codec a matrix, the embedding and a vector take."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from zen_jax.layout import EMBED, HEAD
from zen_jax.training.format_study import codecs
from zen_jax.training.format_study.codecs import Codec

Tensors = Mapping[str, np.ndarray]


def _words(codec: Codec) -> str:
    """A codec's name and settings."""
    if isinstance(codec, partial):
        settings = ",".join(f"{name}={value}" for name, value in codec.keywords.items())
        return f"{codec.func.__name__}({settings})"
    return codec.__name__


@dataclasses.dataclass(frozen=True)
class Format:
    """How a whole fine-tune is stored.

    Attributes:
      name: in the results.
      group: under which heading it stands.
      title: in the tables.
      matrix: of linear layers.
      embedding: of the embedding and of the head; None for the matrices' own.
      vector: of norms and biases.
    """

    name: str
    group: str
    title: str
    matrix: Codec
    embedding: Codec | None = None
    vector: Codec = codecs.own_vector

    @property
    def spec(self) -> str:
        """Its codecs with their settings, in words that are equal for equal formats."""
        return " ".join(_words(c) for c in (self.matrix, self.embedding, self.vector) if c)

    def codec(self, name: str, tensor: np.ndarray) -> Codec:
        """The codec of a tensor by its Hugging Face name."""
        if tensor.ndim == 1:
            return self.vector
        if name in (EMBED, HEAD):
            return self.embedding or self.matrix
        return self.matrix


REFERENCE, ZEROS, SCALES, LEVELS, EMBEDDING, OTHERS = GROUPS = (
    "References",
    "Treatment of zeros",
    "Scales",
    "Levels",
    "Embedding and head",
    "Other ways to spend the bytes",
)
DEFAULT = "row"
_ROW = codecs.signs
_IN_TURN = partial(codecs.signs_in_turn, levels=2)
_SVD = partial(codecs.low_rank, levels=1)

FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("base", REFERENCE, "the base alone", codecs.shared, vector=codecs.shared),
        Format("bf16-delta", REFERENCE, "delta in bfloat16", codecs.bf16_delta),
        Format("tuned", REFERENCE, "the fine-tune itself", codecs.whole, vector=codecs.whole),
        Format("row", ZEROS, "signs, a scale a row, zeros hashed", _ROW),
        Format("row-plus", ZEROS, "zeros are +1", codecs.signs_plus),
        Format(
            "ternary-zeros",
            ZEROS,
            "ternary, zeros alone are 0",
            partial(codecs.ternary, threshold="zeros"),
        ),
        Format("ternary", ZEROS, "ternary, best threshold", codecs.ternary),
        Format("row-bf16", SCALES, "a bfloat16 scale a row", partial(_ROW, bf16=True)),
        Format("matrix", SCALES, "a scale a matrix", partial(_ROW, scale="matrix")),
        Format("row-column", SCALES, "row and column", codecs.signs_row_column),
        Format(
            "row-column-bf16",
            SCALES,
            "row and column, bfloat16",
            partial(codecs.signs_row_column, bf16=True),
        ),
        Format("row-2", LEVELS, "2 levels one after the other", _IN_TURN),
        Format(
            "row-3", LEVELS, "3 levels one after the other", partial(codecs.signs_in_turn, levels=3)
        ),
        Format(
            "row-column-2",
            LEVELS,
            "2 levels, row and column, one after the other",
            partial(codecs.signs_row_column, levels=2),
        ),
        Format("row-2-together", LEVELS, "2 levels fitted together", partial(_ROW, levels=2)),
        Format("row-3-together", LEVELS, "3 levels fitted together", partial(_ROW, levels=3)),
        Format("row-embed-2", EMBEDDING, "embedding 2 levels one after the other", _ROW, _IN_TURN),
        Format("row-embed-whole", EMBEDDING, "embedding whole", _ROW, codecs.whole),
        Format("row-embed-shared", EMBEDDING, "embedding the base's", _ROW, codecs.shared),
        Format("two-bit", OTHERS, "delta rounded to 2 bits (compare 2 levels)", codecs.two_bit),
        Format("svd-1", OTHERS, "SVD, bytes of 1 level", _SVD),
        Format("svd-2", OTHERS, "SVD, bytes of 2 levels", partial(codecs.low_rank, levels=2)),
        Format("svd-3", OTHERS, "SVD, bytes of 3 levels", partial(codecs.low_rank, levels=3)),
        Format("svd-embed-whole", OTHERS, "SVD, embedding whole", _SVD, codecs.whole),
        Format("svd-embed-shared", OTHERS, "SVD, embedding the base's", _SVD, codecs.shared),
    )
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A fine-tune after a format.

    Attributes:
      tensors: what the format gives back, float32, by Hugging Face name.
      nbytes: of what is stored.
      error: ||delta - what is given back of it|| / ||delta|| over all matrices; 0 without a delta.
    """

    tensors: dict[str, np.ndarray]
    nbytes: int
    error: float


def store(chosen: Format, base: Tensors, tuned: Tensors) -> Stored:
    """Takes a fine-tune through a format.

    Args:
      chosen: the format.
      base, tuned: Hugging Face tensors of the same names and shapes.

    Raises:
      ValueError: names or shapes differ.
    """
    if set(base) != set(tuned):
        raise ValueError(f"tensors differ: {', '.join(sorted(set(base) ^ set(tuned)))}")
    tensors: dict[str, np.ndarray] = {}
    nbytes, left, norm = 0, 0.0, 0.0
    for name, start in base.items():
        tensors[name], taken = chosen.codec(name, start)(start, tuned[name])
        nbytes += taken
        if start.ndim == 2:
            wanted = tuned[name].astype(np.float32)
            left += float(np.sum(np.square(wanted - tensors[name]), dtype=np.float64))
            norm += float(np.sum(np.square(wanted - start.astype(np.float32)), dtype=np.float64))
    return Stored(tensors, nbytes, (left / norm) ** 0.5 if norm else 0.0)


def share_of_zeros(base: Tensors, tuned: Tensors) -> float:
    """The share of the matrices' deltas that are exactly 0."""
    pairs = [(base[n].astype(np.float32), tuned[n].astype(np.float32)) for n in base]
    matrices = [(a, b) for a, b in pairs if a.ndim == 2]
    zeros = sum(int(np.count_nonzero(a == b)) for a, b in matrices)
    return zeros / sum(a.size for a, _ in matrices)
