"""Questions beside the table: a base in 8 bits, what more bytes would do, and a delta that prompts
have and decoding has not."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zen_jax.attention import attend, visible
from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.model import Layer, make_merge
from zen_jax.training.format_study.formats import share_of_zeros
from zen_jax.training.format_study.measure import Examiner
from zen_jax.training.format_study.study import Results, marks_kept
from zen_jax.training.quality.methods import METHODS, Case, Method
from zen_jax.training.quality.spending import spend
from zen_jax.training.residual import float32_params

Eight = Literal["int8", "fp8"]


def eight_bits(base: Mapping[str, np.ndarray], kind: Eight) -> tuple[dict[str, np.ndarray], int]:
    """A base whose matrices were rounded to 8 bits with a float32 scale a row, and its bytes.

    Args:
      base: tensors by Hugging Face name.
      kind: "int8", the largest of a row at 127; or "fp8", e4m3 with it at 448.

    Returns:
      What is given back, bfloat16, vectors as they were; and the bytes of codes and scales.
    """
    given, nbytes = {}, 0
    for name, value in base.items():
        if value.ndim == 1:
            given[name], nbytes = value, nbytes + value.nbytes
            continue
        wide = value.astype(np.float32)
        step = np.abs(wide).max(axis=1, keepdims=True) / (127 if kind == "int8" else 448)
        scaled = wide / np.where(step > 0, step, 1)
        if kind == "int8":
            codes = np.rint(scaled)
        else:
            codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        given[name] = (step * codes).astype(ml_dtypes.bfloat16)
        nbytes += value.size + 4 * len(value)
    return given, nbytes


@functools.lru_cache(maxsize=2)
def prompt_only(config: ModelConfig) -> Callable[..., jax.Array]:
    """Jitted (variant, base, tokens int32[B, T], prompt bool[B, T]) -> logits float32[B, T, V].

    Positions of a prompt go through the variant's weights, the others through the base's, attending
    to the keys and values that each position left: what a server gives that adds deltas to prompts
    alone.
    """
    merge = make_merge(config)

    def forward(variant: Params, base: Params, tokens: jax.Array, prompt: jax.Array) -> jax.Array:
        models = merge(variant), merge(base)
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        def choose(one: Any, other: Any) -> Any:
            return jnp.where(prompt.reshape(*prompt.shape, *(1,) * (one.ndim - 2)), one, other)

        x = choose(*(model.embed.lookup(tokens, jnp.float32) for model in models))
        for pair in zip(*(model.layers for model in models), strict=True):
            x = _layer(pair, x, at, choose)
        return choose(*(model.logits(model.final_norm(x)) for model in models))

    return jax.jit(forward)


def _layer(pair: tuple[Layer, Layer], x: jax.Array, at: jax.Array, choose: Any) -> jax.Array:
    projected = [layer.attention.project(layer.attn_norm(x), at) for layer in pair]
    q, k, v = (choose(*both) for both in zip(*projected, strict=True))
    y = attend(q, k, v, visible(at, at, pair[0].attention.window)).reshape(*x.shape[:2], -1)
    x = x + choose(*(layer.attention.o(y) for layer in pair))
    return x + choose(*(layer.mlp(layer.mlp_norm(x)) for layer in pair))


def measure(case: Case, results: Results, say: Callable[[str], None], rows: int = 40) -> None:
    """All questions for one fine-tune, on some rows of its sheet.

    Args:
      case: the fine-tune.
      results: where to keep measurements; those that are there are not made again.
      say: told each one that is done.
      rows: of the sheet.
    """
    subject = case.subject
    sheet = subject.sheet.part(rows, subject.sheet.batch)
    matrices = [value for value in subject.base.values() if value.ndim == 2]
    about = {
        "title": subject.title,
        "answers": sheet.answers,
        "tokens": int(sheet.counted.sum()),
        "weights": sum(value.size for value in matrices),
        "zeros": round(share_of_zeros(subject.base, subject.tuned), 4),
    }
    found = results.open(subject.name, about)
    examine = Examiner(subject.config, sheet, float32_params(subject.config, subject.tuned))

    def keep(name: str, nbytes: int, tensors: Mapping[str, np.ndarray]) -> None:
        marks = examine(float32_params(subject.config, tensors))
        found[name] = {"key": name, "bytes": nbytes, **marks_kept(marks)}
        results.save()
        say(name)

    for kind in ("bf16", "int8", "fp8"):
        if f"fit-{kind}" in found:
            continue
        base, nbytes = subject.base, sum(value.nbytes for value in subject.base.values())
        if kind != "bf16":
            base, nbytes = eight_bits(base, kind)
        keep(f"base-{kind}", nbytes, base)
        on_it = dataclasses.replace(
            case, subject=dataclasses.replace(subject, base=base), fitted={}
        )
        for name in ("row", "fit"):
            stored = METHODS[name].store(on_it)
            keep(f"{name}-{kind}", stored.nbytes, stored.tensors)
    if "2 levels" not in found:
        for name, bits, error in spend(case):
            found[name] = {"key": name, "bits": round(bits, 4), "error": round(error, 5)}
        results.save()
        say("spending")
    if "prompt-only" not in found:
        keep("tuned", sum(value.nbytes for value in subject.base.values()), subject.tuned)
        marks = examine.judge(_prompt_only(case, METHODS["row"]))
        found["prompt-only"] = {"key": "prompt-only", "bytes": 0, **marks_kept(marks)}
        results.save()
        say("prompt-only")


def _prompt_only(case: Case, method: Method, rows: int = 40) -> Any:
    """Log-probabilities of a sheet's batches; a text's first half is its prompt."""
    subject = case.subject
    run = prompt_only(subject.config)
    mine, base = (
        float32_params(subject.config, tensors)
        for tensors in (method.store(case).tensors, subject.base)
    )
    for tokens, counted in subject.sheet.part(rows, subject.sheet.batch).batches():
        first = counted.argmax(axis=1) if subject.sheet.answers else counted.shape[1] // 2
        at = np.arange(counted.shape[1])
        prompt = at <= np.broadcast_to(np.asarray(first)[..., None], counted.shape)
        yield jax.nn.log_softmax(run(mine, base, tokens[:, :-1], prompt), axis=-1)
