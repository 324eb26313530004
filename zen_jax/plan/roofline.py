"""How long a step should take, from bytes, operations and what the cards say to each other.

A product takes the longer of two: its bytes at the bandwidth that is reached, and its matrix
operations, as `pallas_kernels.aot.roofline` has them for compiled kernels. The integer operations
that unpack signs, 0.55 for a weight and variant, hide behind the least matrix operation. Between
the products stand attention, sums over the cards, and small kernels. All are predictions: none was
measured on a card. `ASSUMED` says what they rest on.
"""

import dataclasses
import math

import jax.numpy as jnp

from zen_jax.kv_cache import page_bytes
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.plan.chips import Chip
from zen_jax.plan.memory import BASE_DTYPES, Layout

REACHED = 0.92  # of the memory's bandwidth
TENSOR = 0.73  # of the tensor cores' rate, by a long prompt's products
START = 3e-6  # s for a product to start
SMALL = 2e-6  # s for a small kernel between products
SMALL_KERNELS = 22  # of them in a layer, as compiled
BUSY = 0.85  # of the multiprocessors, over the waves of a product's programs
LEAST_CYCLES = 16  # of a matrix operation of 64 outputs by 16 inputs
LINK = 0.8  # of the links' bandwidth, by a sum over the cards
RECONSTRUCTED, TWO_PRODUCTS = 1.03, 1.69  # a prompt's product with signs, over the base's
SUM_BYTES = 4  # partial sums are float32

ASSUMED = (
    f"{REACHED:.0%} of the memory's bandwidth is reached, {TENSOR:.0%} of the tensor cores' rate "
    "by prompts",
    f"a product takes {START * 1e6:.0f} us to start; a layer has {SMALL_KERNELS} small kernels of "
    f"{SMALL * 1e6:.0f} us",
    f"{BUSY:.0%} of the multiprocessors are busy; a matrix operation of 64 outputs by 16 inputs "
    f"takes {LEAST_CYCLES} cycles or more",
    "a sum over n cards takes its start and 2 (n - 1) / n times its float32 bytes at "
    f"{LINK:.0%} of a link; nothing else runs meanwhile",
    "attention gathers the pages of all rows at their longest, writes and reads them again, as the "
    "step is compiled today",
    f"a variant's prompt takes {RECONSTRUCTED} times the base's products where scales are large "
    f"beside the weights, else up to {TWO_PRODUCTS}",
)


@dataclasses.dataclass(frozen=True)
class Product:
    """A weight as one card has it.

    Attributes:
      outputs: O.
      inputs: I.
      count: how many of them a step has.
    """

    outputs: int
    inputs: int
    count: int


def products(lay: Layout) -> list[Product]:
    """The weights that a token is multiplied with, on one card."""
    share = lay.share
    found: dict[tuple[int, int], int] = {}

    def add(spec: ParamSpec) -> None:
        if spec.kind == "linear" or (spec.kind == "embed" and share.tie_word_embeddings):
            size = (math.prod(spec.shape[:-1]), spec.shape[-1])
            found[size] = found.get(size, 0) + 1

    map_specs(add, share)
    return [Product(*size, count) for size, count in found.items()]


@dataclasses.dataclass(frozen=True)
class Step:
    """Where a step's time goes, in seconds; bytes and operations of one card.

    Attributes:
      products: weights and signs.
      attention: keys and values.
      reduces: sums over the cards, and bringing logits together.
      small: everything else.
      bytes: from and to memory.
      flops: matrix operations.
    """

    products: float
    attention: float
    reduces: float
    small: float
    bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.attention + self.reduces + self.small


def all_reduces(lay: Layout) -> int:
    """Sums over the cards in a step: after the embedding, each o and each down, where those are
    sharded."""
    axes = lay.placement.sharded
    if lay.devices == 1:
        return 0
    a_layer = ("heads" in axes) + ("ff" in axes)
    return a_layer * lay.config.num_layers + ("vocab" in axes)


def _sums(chip: Chip, lay: Layout, tokens: int, logits: int) -> float:
    """Time of a call's sums over `tokens`, and of bringing `logits` rows of logits together."""
    n = lay.devices
    if n == 1:
        return 0.0
    rate = chip.link * LINK
    each = chip.reduce_start + 2 * (n - 1) / n * tokens * lay.config.hidden_size * SUM_BYTES / rate
    whole = all_reduces(lay) * each
    if "vocab" in lay.placement.sharded:
        share = logits * lay.config.vocab_size * 2 * (n - 1) / n
        whole += chip.reduce_start + share / rate
    return whole


def decode_step(chip: Chip, lay: Layout, rows: int, entries: int, *, gathered: bool = True) -> Step:
    """One token for each of `rows` rows.

    Args:
      chip: the card.
      lay: what lies on it.
      rows: B.
      entries: distinct variants among them; 0 is the base alone.
      gathered: attention is as compiled today; else it reads each row's pages once.
    """
    each = BASE_DTYPES[lay.base_dtype]
    width = _padded(-(-rows // max(entries, 1)))
    time = moved = flops = 0.0
    for product in products(lay):
        weights = product.outputs * product.inputs
        size = weights * (each + entries / 8) + 4 * product.outputs * (rows + entries)
        size += 2 * product.inputs * rows
        least = LEAST_CYCLES * 4096 / chip.flops_per_cycle
        columns = 2048 / chip.flops_per_cycle
        cycles = max(least, columns * _padded(rows)) + entries * max(least, columns * width)
        busy = BUSY * chip.multiprocessors * chip.clock
        matrix = weights / (64 * 16) * cycles / busy
        own = max(size / (chip.bandwidth * REACHED), matrix) + START
        time += product.count * own
        moved += product.count * size
        flops += product.count * 2.0 * weights * rows * (1 + (entries > 0))
    share, sizes = lay.share, lay.sizes
    head = share.num_kv_heads * share.head_dim
    seen = 2 * rows * sizes.columns * sizes.page_size * head
    held = _number_bytes(lay)
    copied = 2 * jnp.dtype(sizes.dtype).itemsize if gathered else 0
    kv = lay.config.num_layers * seen * (held + copied)
    flops += lay.config.num_layers * 2.0 * seen * (share.num_heads // share.num_kv_heads)
    return Step(
        products=time,
        attention=kv / (chip.bandwidth * REACHED),
        reduces=_sums(chip, lay, rows, rows),
        small=lay.config.num_layers * SMALL_KERNELS * SMALL,
        bytes=moved + kv,
        flops=flops,
    )


def _number_bytes(lay: Layout) -> float:
    """Bytes of one number of a key or a value, its share of a scale included."""
    size, head = lay.sizes.page_size, lay.share.num_kv_heads * lay.share.head_dim
    one = page_bytes(lay.share, size, lay.sizes.held_as)
    return one / (2 * lay.share.num_layers * size * head)


def prompt_read(chip: Chip, lay: Layout, tokens: int, over: float = 1.0, signs: int = 0) -> Step:
    """Reading one prompt, in the engine's chunks, up to its first token.

    Args:
      chip: the card.
      lay: what lies on it.
      tokens: of the prompt.
      over: what a product takes beside the base's: 1, `RECONSTRUCTED` or `TWO_PRODUCTS`.
      signs: 1 where a variant's signs are read too.
    """
    each, share = BASE_DTYPES[lay.base_dtype], lay.share
    layers, d = lay.config.num_layers, lay.config.hidden_size
    rate = chip.bandwidth * REACHED
    total = Step(0, 0, 0, 0, 0, 0)
    for start in range(0, tokens, lay.sizes.chunk_tokens):
        size = min(lay.sizes.chunk_tokens, tokens - start)
        time = moved = flops = 0.0
        for product in products(lay):
            weights = product.outputs * product.inputs
            last = product.outputs >= share.vocab_size
            many = 1 if last else size
            own = weights * (each + signs / 8) + many * (2 * product.inputs + 4 * product.outputs)
            work = 2.0 * weights * many
            time += product.count * (max(own / rate, over * work / (chip.flops * TENSOR)) + START)
            moved += product.count * own
            flops += product.count * work
        scores = 4.0 * size * (start + size) * share.num_heads * share.head_dim * layers
        kv = 2 * (start + size) * share.num_kv_heads * share.head_dim
        kv *= _number_bytes(lay) * layers
        step = Step(
            products=time,
            attention=max(scores / (chip.flops * TENSOR / 2), kv / rate),
            reduces=_sums(chip, lay, size, 1),
            small=layers * SMALL_KERNELS * max(SMALL, 4.0 * size * d / rate),
            bytes=moved + kv,
            flops=flops + scores,
        )
        pairs = zip(dataclasses.astuple(total), dataclasses.astuple(step), strict=True)
        total = Step(*(a + b for a, b in pairs))
    return total


def _padded(rows: int) -> int:
    """Rows that a batch takes in the decode kernel, which takes 64 at most at a time."""
    return max(8, 1 << (rows - 1).bit_length())
