"""Our model against transformers, part by part, in float32: the golden files of tests/golden.

The reference was computed in float64, so what is measured here is float32 rounding alone. Each part
gets the reference's own input, so that a fault shows in the part that has it. `ERRORS` bounds the
largest difference over the largest value of the reference.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from zen_jax.config import ModelConfig
from zen_jax.kv_cache import InPages, make_cache, own_pages
from zen_jax.layout import Params, fuse, tensor_shapes
from zen_jax.model import Transformer, make_forward, make_merge

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = (
    "llama_tied",
    "llama_untied",
    "llama3_rope",
    "mistral_window",
    "qwen2_bias",
    "qwen3_norm",
)
# About five times what was measured on x86-64.
ERRORS = {
    "embed": 0.0,
    "attn_norm": 1e-6,
    "q": 1e-6,
    "k": 1e-6,
    "attn": 1.5e-6,
    "mlp_norm": 1e-6,
    "mlp": 1e-6,
    "layer": 3e-6,
    "final_norm": 5e-6,
    "logits": 5e-6,
}


class Golden(NamedTuple):
    """One case: the model in float32 and what the reference computes with it."""

    config: ModelConfig
    params: Params
    values: dict[str, Any]  # arrays by name; see tests/golden/make_goldens.py

    def model(self) -> Transformer:
        """The modules around the parameters."""
        return make_merge(self.config)(self.params)

    def positions(self) -> jax.Array:
        """int32[B, T], each row from 0."""
        tokens = self.values["tokens"]
        return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def read_config(name: str) -> dict[str, Any]:
    """The contents of a case's config.json."""
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> Golden:
    """A golden folder, its weights widened to float32."""
    folder = GOLDEN / request.param
    config = ModelConfig.from_hf(read_config(request.param))
    tensors = load_file(folder / "model.safetensors")
    params = fuse(config, {name: jnp.asarray(t, jnp.float32) for name, t in tensors.items()})
    with np.load(folder / "golden.npz") as values:
        return Golden(config, params, dict(values))


def heads(golden: Golden) -> tuple[jax.Array, jax.Array]:
    """Queries [B, T, N, H] and keys [B, T, K, H] of layer 0 from the reference's norm."""
    attention = golden.model().layers[0].attention
    q, k, _ = attention.project(jnp.asarray(golden.values["attn_norm"]), golden.positions())
    return q.reshape(*q.shape[:2], -1, q.shape[-1]), k


PARTS: dict[str, Callable[[Golden], Any]] = {
    "embed": lambda g: g.model().embed.lookup(g.values["tokens"], jnp.float32),
    "attn_norm": lambda g: g.model().layers[0].attn_norm(g.values["embed"]),
    "q": lambda g: heads(g)[0],
    "k": lambda g: heads(g)[1],
    "attn": lambda g: g.model().layers[0].attention(g.values["attn_norm"], g.positions(), None)[0],
    "mlp_norm": lambda g: g.model().layers[0].mlp_norm(g.values["embed"] + g.values["attn"]),
    "mlp": lambda g: g.model().layers[0].mlp(g.values["mlp_norm"]),
    "layer": lambda g: g.model().layers[0](g.values["embed"], g.positions(), None)[0],
    "final_norm": lambda g: g.model()(g.values["tokens"], g.positions())[0],
    "logits": lambda g: make_forward(g.config)(g.params, jnp.asarray(g.values["tokens"])),
}


def check(name: str, got: Any, want: np.ndarray) -> None:
    """Fails when `got` is further from `want` than the bound of this part."""
    assert got.shape == want.shape
    assert got.dtype == jnp.float32
    error = float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())
    assert error <= ERRORS[name], f"{name} differs by {error:.1e} of its size"


@pytest.mark.parametrize("part", PARTS)
def test_part_equals_reference(golden: Golden, part: str) -> None:
    check(part, PARTS[part](golden), golden.values[part])


def test_parameters_are_those_of_the_checkpoint(golden: Golden, request: Any) -> None:
    stored = load_file(GOLDEN / request.node.callspec.params["golden"] / "model.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == tensor_shapes(golden.config)


def test_token_by_token_equals_the_reference_logits(golden: Golden) -> None:
    """Through the cache, one token a row and step, every position has the whole pass's logits."""
    merge = make_merge(golden.config)
    tokens = golden.values["tokens"]
    batch, length = tokens.shape

    @jax.jit
    def step(params: Params, cache: Any, token: jax.Array, position: jax.Array) -> Any:
        model = merge(params)
        at = jnp.full((batch, 1), position, jnp.int32)
        hidden, cache = model(token, at, cache, where=InPages(own_pages(batch, 1)))
        return model.logits(hidden), cache

    cache = make_cache(golden.config, batch, length + 3, jnp.float32)
    rows = []
    for t in range(length):
        logits, cache = step(golden.params, cache, tokens[:, t : t + 1], jnp.int32(t))
        rows.append(logits)
    check("logits", jnp.concatenate(rows, axis=1), golden.values["logits"])


def test_greedy_continuation_equals_reference(golden: Golden) -> None:
    prompt, want = golden.values["prompt"], golden.values["greedy"]
    forward = jax.jit(make_forward(golden.config))
    tokens = np.zeros((1, len(prompt) + len(want)), np.int32)
    tokens[0, : len(prompt)] = prompt
    for end in range(len(prompt), tokens.shape[1]):
        tokens[0, end] = int(forward(golden.params, tokens)[0, end - 1].argmax())
    np.testing.assert_array_equal(tokens[0, len(prompt) :], want)


def test_goldens_leave_greedy_tokens_no_doubt(golden: Golden) -> None:
    """The runner-up is further off than the error that a logit may have."""
    allowed = 2 * ERRORS["logits"] * np.abs(golden.values["logits"]).max()
    assert golden.values["margin"].min() > 10 * allowed
