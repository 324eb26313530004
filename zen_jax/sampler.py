"""The choice of each row's next token, on the device.

In vLLM's order. Log-probabilities are of the raw logits. Then these are changed: stop tokens are
masked before min_tokens, logit_bias is added, then come repetition, frequency and presence penalty.
A greedy row takes the likeliest. Others divide by temperature, apply min_p, top_k and top_p, and
draw once.

A row's noise depends on its seed, sample and position alone, and what it asks for on nothing
else: a request gives the same tokens in any row of any batch. What no row asks for is skipped, so
that a plain step reads the logits once or twice and never sorts.

Letters: B rows, V vocabulary, n rows of one call.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams

# An array on host or device, or where one lies.
Array = Any

# The most tokens that end an answer: those of the request and the model's own.
MAX_STOPS = 128

# Temperatures below are greedy, as in vLLM.
_COLDEST = 1e-5

# Candidates that top_k and top_p are looked for among before everything is sorted.
_CANDIDATES = 256

# Tokens of a block: a draw chooses a block, then a token of it, which takes V / 128 + 128 noises.
_BLOCK = 128

# Positions of a prompt whose logits are there at a time.
_TILE = 16

# An index that is in no vocabulary: what is written there is dropped.
_NOWHERE = np.iinfo(np.int32).max

_REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_WHOLE = ("top_k", "seed_high", "seed_low", "sample", "first_stop", "last", "wanted")


def _real(name: str) -> Any:
    """A column of `RowSampling.reals`, float32[B]."""
    return property(lambda rows: rows.reals[:, _REALS.index(name)])


def _whole(name: str) -> Any:
    """A column of `RowSampling.whole`, int32[B]."""
    return property(lambda rows: rows.whole[:, _WHOLE.index(name)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """What B rows ask for, packed into two arrays, so that a request's settings are two transfers.

    Attributes:
      reals: float32[B, 6 + biases], the columns named by `_REALS`, then what is added to logits.
      whole: int32[B, 7 + stops + biases], the columns named by `_WHOLE`, then the tokens that end
        an answer, then those that the biases are for; unused ones are beyond any vocabulary.
    """

    reals: Array
    whole: Array

    @classmethod
    def empty(cls, rows: int) -> "RowSampling":
        """Rows that ask for nothing: greedy, without end."""
        neutral = _neutral()
        return cls(
            jnp.asarray(np.repeat(neutral.reals, rows, axis=0)),
            jnp.asarray(np.repeat(neutral.whole, rows, axis=0)),
        )

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        *,
        prompt: int,
        stops: Set[int],
        sample: int = 0,
        end: int = _NOWHERE,
    ) -> "RowSampling":
        """One row's settings as NumPy arrays, B = 1.

        Args:
          params: validated.
          seed: 0 to 2**64 - 1.
          prompt: tokens of the request's prompt. Positions count from its start, so an answer that
            is computed again after its row was taken away keeps these settings.
          stops: all tokens that end the answer, the model's own among them unless ignored.
          sample: which of the request's samples this is.
          end: tokens of prompt and answer together that there is room for.

        Raises:
          ValueError: more than 128 tokens end the answer.
        """
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} tokens end the answer; expected {MAX_STOPS} at most")
        row = _neutral()
        row.whole[0, len(_WHOLE) : len(_WHOLE) + len(stops)] = sorted(stops)
        row.whole[0, : len(_WHOLE)] = (
            max(params.top_k, 0),
            *np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32),
            sample,
            min(prompt + params.min_tokens, _NOWHERE),
            min(prompt + params.max_tokens, end) - 1,
            params.logprobs is not None,
        )
        row.reals[0, : len(_REALS)] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        if params.temperature < _COLDEST:  # filters are nothing to a greedy row, and would cost
            row.reals[0, :3] = (0.0, 1.0, 0.0)
            row.whole[0, 0] = 0
        for i, (token, bias) in enumerate(sorted(params.logit_bias.items())):
            row.whole[0, len(_WHOLE) + MAX_STOPS + i] = token
            row.reals[0, len(_REALS) + i] = bias
        return row

    temperature = _real("temperature")
    top_p = _real("top_p")
    min_p = _real("min_p")
    repetition = _real("repetition")
    presence = _real("presence")
    frequency = _real("frequency")
    top_k = _whole("top_k")
    sample = _whole("sample")
    first_stop = _whole("first_stop")
    last = _whole("last")
    wanted = _whole("wanted")

    @property
    def seed(self) -> Array:
        """uint32[B, 2], key data (threefry)."""
        at = _WHOLE.index("seed_high")
        return jax.lax.bitcast_convert_type(self.whole[:, at : at + 2], jnp.uint32)

    @property
    def stops(self) -> Array:
        """int32[B, 128], the tokens that end an answer."""
        return self.whole[:, len(_WHOLE) : len(_WHOLE) + MAX_STOPS]

    @property
    def biased(self) -> Array:
        """int32[B, 1024], the tokens that `biases` are for."""
        return self.whole[:, len(_WHOLE) + MAX_STOPS :]

    @property
    def biases(self) -> Array:
        """float32[B, 1024], added to logits."""
        return self.reals[:, len(_REALS) :]

    @property
    def penalised(self) -> Array:
        """bool[B], whether the counts of tokens matter to a row."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    def only(self, ran: jax.Array) -> "RowSampling":
        """The settings, but rows that do not run, bool[B], ask for nothing and so cost nothing."""
        return jax.tree.map(lambda own, off: jnp.where(ran[:, None], own, off), self, _neutral())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities by the raw logits. L is 20, or V if that is less.

    Attributes:
      own: float32[*], of given tokens.
      top_ids: int32[*, L], the likeliest tokens, the likeliest first, of equals the lowest id.
      top: float32[*, L], theirs.
    """

    own: Array
    top_ids: Array
    top: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], vocab_size: int) -> "Logprobs":
        """What stands for log-probabilities that nobody asked for."""
        top = (*shape, min(MAX_LOGPROBS, vocab_size))
        return cls(
            jnp.zeros(shape, jnp.float32), jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What was chosen for n rows.

    Attributes:
      token: int32[n].
      ended: bool[n], whether it ends the answer: a stop token, or the last of max_tokens.
      logprobs: of the tokens, [n]; 0 unless some row asks.
      prompt: of the tokens of a prompt that were read in the same call, [n, T], each the one that
        comes after a position; 0 unless some row asks. None where no prompt was read.
    """

    token: Array
    ended: Array
    logprobs: Logprobs
    prompt: Logprobs | None = None


def init_seen(rows: int, vocab_size: int) -> jax.Array:
    """Counts of tokens, int32[B, V]: bit 0 says that a token stands in the row's prompt, the bits
    above how often it stands in the answer."""
    return jnp.zeros((rows, vocab_size), jnp.int32)


def clear_counts(seen: jax.Array, rows: jax.Array) -> jax.Array:
    """Counts of 0 for rows that begin a request.

    Args:
      seen: int32[B, V].
      rows: int32[n]; one that is not 0 to B - 1 is none.
    """
    return seen.at[jnp.where(rows < 0, seen.shape[0], rows)].set(0, mode="drop")


def count_tokens(
    seen: jax.Array, rows: RowSampling, at: jax.Array, tokens: jax.Array, made: jax.Array
) -> jax.Array:
    """Counts tokens for the penalties of their rows; rows without penalties are left alone.

    Of one row, tokens of the prompt have to come before those of the answer. Run again over a
    cleared row, as after a row was taken away, it gives the same counts.

    Args:
      seen: int32[B, V].
      rows: of the B rows.
      at: int32[N], each token's row; one outside 0 to B - 1 counts nothing.
      tokens: int32[N].
      made: bool[N], whether the token is of the answer.
    """
    size = seen.shape[0]
    wanted = (at >= 0) & (at < size) & rows.penalised[jnp.clip(at, 0, size - 1)]
    seen = seen.at[jnp.where(wanted & ~made, at, size), tokens].max(1, mode="drop")
    return seen.at[jnp.where(wanted & made, at, size), tokens].add(2, mode="drop")


def sample(
    logits: jax.Array,
    rows: RowSampling,
    seen: jax.Array,
    positions: jax.Array,
    at: jax.Array | None = None,
) -> Sampled:
    """Chooses the next token of n rows.

    Args:
      logits: float32[n, V]; -inf for tokens that a row's model does not have.
      rows: settings of the n rows; `only` those that run.
      seen: int32[B, V], counts of all rows.
      positions: int32[n], the position that the token takes in its sequence, prompt included.
      at: int32[n], which of the B rows these are; None for all of them in order.

    Returns:
      The tokens; of equally likely ones a greedy row takes the first. The caller counts them.
    """

    def changed() -> jax.Array:
        counts = seen if at is None else seen[at]
        return _choose(_change(logits, rows, counts, positions), rows, positions)

    early = positions < rows.first_stop
    asked = rows.penalised | (rows.biased[:, 0] < _NOWHERE) | early
    token = jax.lax.cond(jnp.any(asked), changed, lambda: _choose(logits, rows, positions))
    ended = jnp.any(rows.stops == token[:, None], axis=1) | (positions >= rows.last)
    logprobs = jax.lax.cond(
        jnp.any(rows.wanted > 0),
        lambda: token_logprobs(logits, token),
        lambda: Logprobs.zeros(token.shape, logits.shape[1]),
    )
    return Sampled(token, ended, logprobs)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Log-probabilities of tokens, and of the likeliest in their places.

    Args:
      logits: float32[*, V].
      tokens: int32[*].
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
    return Logprobs(own[..., 0], ids, values - total)


def prompt_logprobs(
    logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array
) -> Logprobs:
    """Log-probabilities of a prompt's tokens, [n, T], some positions at a time.

    Logits of all positions at once would be V floats for each of them.

    Args:
      logits_of: hidden states [n, t, D] -> float32[n, t, V], each position for itself.
      hidden: [n, T, D].
      targets: int32[n, T], the token that comes after each position.
    """
    length = targets.shape[1]
    tile = min(_TILE, length)

    def tiles(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -length % tile), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, tile, *x.shape[2:]), 1, 0)

    def together(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    found = jax.lax.map(
        lambda part: token_logprobs(logits_of(part[0]), part[1]), (tiles(hidden), tiles(targets))
    )
    return jax.tree.map(together, found)


def _neutral() -> RowSampling:
    """A row that asks for nothing, as NumPy arrays."""
    reals = np.zeros((1, len(_REALS) + MAX_BIASES), np.float32)
    reals[0, _REALS.index("top_p")] = reals[0, _REALS.index("repetition")] = 1.0
    whole = np.full((1, len(_WHOLE) + MAX_STOPS + MAX_BIASES), _NOWHERE, np.int32)
    whole[0, : len(_WHOLE)] = 0
    whole[0, _WHOLE.index("last")] = _NOWHERE
    return RowSampling(reals, whole)


def _change(
    logits: jax.Array, rows: RowSampling, seen: jax.Array, positions: jax.Array
) -> jax.Array:
    """float32[n, V] after min_tokens, biases and penalties; `seen` is int32[n, V]."""
    row = jnp.arange(logits.shape[0])[:, None]
    early = (positions < rows.first_stop)[:, None]
    x = logits.at[row, jnp.where(early, rows.stops, _NOWHERE)].set(-jnp.inf, mode="drop")
    x = x.at[row, rows.biased].add(rows.biases, mode="drop")
    factor = jnp.where(seen > 0, rows.repetition[:, None], 1.0)
    x = jnp.where(x > 0, x / factor, x * factor)
    made = seen >> 1
    return x - rows.frequency[:, None] * made - rows.presence[:, None] * (made > 0)


def _choose(logits: jax.Array, rows: RowSampling, positions: jax.Array) -> jax.Array:
    """int32[n]: the likeliest token of greedy rows, a draw for the others."""
    greedy, hot = _first_best(logits), rows.temperature > 0

    def draw() -> jax.Array:
        x = logits / jnp.where(hot, rows.temperature, 1.0)[:, None]
        x = jax.lax.cond(jnp.any(rows.min_p > 0), lambda: _min_p(x, rows.min_p), lambda: x)
        ranked = (rows.top_k > 0) | (rows.top_p < 1)
        x = jax.lax.cond(jnp.any(ranked), lambda: _likeliest(x, rows.top_k, rows.top_p), lambda: x)
        return _draw(x, rows, positions)

    return jnp.where(hot, jax.lax.cond(jnp.any(hot), draw, lambda: greedy), greedy)


def _min_p(x: jax.Array, min_p: jax.Array) -> jax.Array:
    """Tokens below min_p of the likeliest one's probability at -inf."""
    least = jnp.max(x, axis=1) + jnp.log(min_p)
    return jnp.where(x >= least[:, None], x, -jnp.inf)


def _likeliest(x: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """All but the tokens of top_k and top_p at -inf, float32[n, V].

    They are looked for among the 256 likeliest. A row that has more of them, and only such a row,
    is sorted whole.
    """
    size = x.shape[1]
    x = jnp.where(x == 0, 0.0, x)  # -0 is not below 0
    k = jnp.where((top_k > 0) & (top_k < size), top_k, size)
    weight = jnp.exp(x - jnp.max(x, axis=1, keepdims=True)).sum(axis=1)
    # Were XLA to see that only parts of them are used, it would sort everything. One barrier over
    # both would make it fail on a mesh.
    found = jax.lax.top_k(x, min(_CANDIDATES, size))
    values, ids = (jax.lax.optimization_barrier(part) for part in found)
    least, last, settled = _cut(values, ids, k, top_p, weight, size)
    free = (k == size) & (top_p >= 1)
    settled, least = settled | free, jnp.where(free, -jnp.inf, least)

    def whole(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        def look() -> tuple[jax.Array, jax.Array]:
            order = jnp.argsort(-row[0], stable=True).astype(jnp.int32)
            least, last, _ = _cut(row[0][order][None], order[None], row[1], row[2], row[3], size)
            return least[0], last[0]

        return jax.lax.cond(row[4], lambda: (row[5], row[6]), look)

    least, last = jax.lax.cond(
        jnp.all(settled),
        lambda: (least, last),
        lambda: jax.lax.map(
            whole, (x, k[:, None], top_p[:, None], weight[:, None], settled, least, last)
        ),
    )
    least, last = least[:, None], last[:, None]
    kept = (x > least) | ((x == least) & (jnp.arange(size) <= last))
    return jnp.where(kept, x, -jnp.inf)


def _cut(
    values: jax.Array,
    ids: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    weight: jax.Array,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last of the likeliest tokens to keep.

    Args:
      values: float32[n, C], logits of the C likeliest, falling; of equals the lower id is first.
      ids: int32[n, C], theirs.
      top_k: int32[n], 1 to V.
      top_p: float32[n]; 1 keeps all.
      weight: float32[n], sum over all V of exp(logit - the largest).
      vocab_size: V.

    Returns:
      float32[n] its logit, int32[n] its id, bool[n] whether that is certain with C of V tokens.
    """
    size = values.shape[1]
    inside = jnp.arange(size) < top_k[:, None]
    share = jnp.where(inside, jnp.exp(values - values[:, :1]), 0.0)
    share /= jnp.where(top_k <= size, share.sum(axis=1), weight)[:, None]
    before = jnp.pad(jnp.cumsum(share, axis=1)[:, :-1], ((0, 0), (1, 0)))
    kept = inside & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    end = jnp.maximum(kept.sum(axis=1) - 1, 0)[:, None]
    least, last = (jnp.take_along_axis(a, end, axis=1)[:, 0] for a in (values, ids))
    every = top_k >= vocab_size
    certain = (top_k <= size) | (every & ~kept[:, -1]) | (values[:, -1] == -jnp.inf)
    return least, last, certain


def _blocks(x: jax.Array) -> jax.Array:
    """float32[n, V] as [n, blocks, 128], the last filled with -inf."""
    rest = -x.shape[1] % _BLOCK
    if rest:
        x = jnp.pad(x, ((0, 0), (0, rest)), constant_values=-jnp.inf)
    return x.reshape(x.shape[0], -1, _BLOCK)


def _within(blocks: jax.Array, block: jax.Array) -> jax.Array:
    """float32[n, 128], one block of each row."""
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _first_best(x: jax.Array) -> jax.Array:
    """int32[n], the first of the largest elements: argmax, by blocks, which is faster on a CPU."""
    blocks = _blocks(x)
    block = jnp.argmax(blocks.max(axis=2), axis=1)
    return (block * _BLOCK + jnp.argmax(_within(blocks, block), axis=1)).astype(jnp.int32)


def _draw(x: jax.Array, rows: RowSampling, positions: jax.Array) -> jax.Array:
    """int32[n], tokens drawn from softmax(x): a block by its share, then a token of it by its own,
    both by Gumbel noise. That is the same distribution, with V / 128 + 128 noises for V."""
    blocks = _blocks(x)
    top = blocks.max(axis=2, keepdims=True)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    share = jnp.log(jnp.exp(blocks - top).sum(axis=2)) + top[:, :, 0]

    def noise(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.gumbel(key, (blocks.shape[1] + _BLOCK,))

    noises = jax.vmap(noise)(rows.seed, rows.sample, positions)
    block = jnp.argmax(share + noises[:, :-_BLOCK], axis=1)
    token = jnp.argmax(_within(blocks, block) + noises[:, -_BLOCK:], axis=1)
    return (block * _BLOCK + token).astype(jnp.int32)
