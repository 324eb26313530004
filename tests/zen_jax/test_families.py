"""Every family through the engine: prefill and decode equal a full pass, fused equals whole."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind, materialise
from zen_jax.delta.bank import BankSchema, DoesNotFit
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.format import WeightDelta
from zen_jax.delta.widen import HeldShape
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.layout import EMBED, HEAD, fuse
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["llama_untied", "llama3_rope", "mistral_window", "qwen2_bias", "qwen3_norm"]
SIZES = EngineConfig(rows=2, max_length=24, chunk_tokens=16)
PROMPT, STEPS = [3, 1, 4, 1, 5, 9, 2], 10
Tensors = dict[str, np.ndarray]


def read(case: str) -> tuple[ModelConfig, Tensors]:
    """A golden folder's configuration and tensors."""
    config = ModelConfig.from_hf(json.loads((GOLDEN / case / "config.json").read_text()))
    return config, load_file(GOLDEN / case / "model.safetensors")


def vary(tensors: Tensors, seed: int = 0) -> dict[str, WeightDelta]:
    """Deltas of a random fine-tune, norms and biases too."""
    rng = np.random.default_rng(seed)
    deltas = {}
    for name, w in tensors.items():
        tuned = w.astype(np.float32) + rng.normal(0, 0.02, w.shape).astype(np.float32)
        pack = w.ndim == 2
        deltas[name] = compress_tensor(w, tuned)[0] if pack else keep_vector(w, tuned)
    return deltas


def decode(
    engine: Engine, bank: Any, slots: tuple[int, int], temperature: float = 0.0
) -> np.ndarray:
    """Tokens [2, STEPS + 1] after the prompt in both rows, greedy unless told otherwise."""
    state = engine.init_state()
    sampling = SamplingParams(temperature=temperature)
    tokens = [np.zeros(2, np.int32)]
    for row, slot in enumerate(slots):
        state, tokens[0][row] = engine.enter(bank, state, row, slot, PROMPT, sampling, row)
    for _ in range(STEPS):
        state, new = engine.decode(bank, state)
        tokens.append(np.asarray(new.token)[0])
    return np.stack(tokens, axis=1)


def greedy_of(config: ModelConfig, params: Any, answer: np.ndarray, vocab: int) -> np.ndarray:
    """What a full pass over prompt and answer would choose at each place of the answer."""
    sequence = jnp.array([[*PROMPT, *answer[:-1].tolist()]])
    logits = np.asarray(jax.jit(make_forward(config))(params, sequence))[0, len(PROMPT) - 1 :]
    return logits[:, :vocab].argmax(-1)


@pytest.mark.parametrize("case", CASES)
def test_engine_equals_a_full_pass_and_eight_devices_equal_one(case: str, devices) -> None:
    config, tensors = read(case)
    deltas, held = vary(tensors), HeldShape.of(config)
    params = fuse(config, {name: jnp.asarray(t) for name, t in tensors.items()})
    schema = BankSchema.covering(config, 2)
    answers = []
    for mesh in (None, make_mesh(model=2, data=4)):
        place = None if mesh is None else Placement.of(config, mesh)
        engine = Engine(place_params(config, params, place), SIZES, schema, mesh)
        bank = engine.write_slot(engine.init_bank(), 1, engine.stage(deltas))
        answers.append(decode(engine, bank, (-1, 1)))
    assert np.array_equal(answers[0], answers[1])
    whole = materialise(params, held.fuse_variant(deltas))
    plain = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    for row, weights in enumerate((plain, whole)):
        want = greedy_of(config, weights, answers[0][row], config.vocab_size)
        assert np.array_equal(answers[0][row], want)


@pytest.mark.parametrize("case", ["llama_tied", "qwen2_bias", "qwen3_norm"])
def test_fused_equals_materialised(case: str) -> None:
    config, tensors = read(case)
    params = fuse(config, {name: jnp.asarray(t, jnp.float32) for name, t in tensors.items()})
    tree = jax.device_put(HeldShape.of(config).fuse_variant(vary(tensors)))
    forward = jax.jit(make_forward(config))
    tokens = jnp.array([PROMPT, PROMPT[::-1]])
    got, want = forward(bind(params, tree), tokens), forward(materialise(params, tree), tokens)
    size = float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * size)


def widened(tensors: Tensors, rows: int, untie: bool) -> tuple[Tensors, dict[str, WeightDelta]]:
    """A fine-tune with more vocabulary rows and perhaps a head of its own, and its deltas."""
    rng = np.random.default_rng(1)
    deltas = vary(tensors, 1)
    embed, vocab = tensors[EMBED], tensors[EMBED].shape[0]
    more = rng.normal(0, 1, (rows, embed.shape[1])).astype(embed.dtype)
    deltas[EMBED] = WeightDelta(deltas[EMBED].bits, deltas[EMBED].scale, tail=more)
    if untie:
        head = rng.normal(0, 1, (vocab + rows, embed.shape[1])).astype(np.float32)
        packed, _ = compress_tensor(embed, head[:vocab])
        deltas[HEAD] = WeightDelta(packed.bits, packed.scale, tail=head[vocab:])
    return tensors, deltas


@pytest.mark.parametrize("untie", [False, True])
def test_more_vocabulary_and_a_head_of_its_own(untie: bool, devices) -> None:
    config, tensors = read("qwen2_bias")
    _, wide = widened(tensors, 3, untie)
    plain = vary(tensors, 2)
    own = ModelConfig.from_hf(
        config.to_hf() | {"vocab_size": config.vocab_size + 3, "tie_word_embeddings": not untie}
    )
    schema = BankSchema.covering(config, 2, configs=[own, config])
    held = schema.held
    assert held.config.vocab_size % 64 == 0 and held.config.tie_word_embeddings is not untie
    params = held.fuse_base({n: jnp.asarray(t, jnp.float32) for n, t in tensors.items()})
    answers = []
    for mesh in (None, make_mesh(model=2, data=4)):
        place = None if mesh is None else Placement.of(held.config, mesh)
        engine = Engine(place_params(held.config, params, place), SIZES, schema, mesh)
        bank = engine.init_bank()
        for slot, deltas in enumerate((wide, plain)):
            bank = engine.write_slot(bank, slot, engine.stage(deltas))
        answers.append((decode(engine, bank, (0, 1)), decode(engine, bank, (-1, 0))))
        hot = decode(engine, bank, (-1, 1), temperature=100.0)  # any token is as likely
        assert (hot < config.vocab_size).all(), "only the wide one has more"
    assert all(np.array_equal(a, b) for a, b in zip(*answers, strict=True))
    (both, alone), vocab = answers[0], config.vocab_size
    assert np.array_equal(both[0], alone[1])
    for answer, deltas, size in ((both[0], wide, vocab + 3), (both[1], plain, vocab)):
        whole = materialise(params, held.fuse_variant(deltas))
        assert np.array_equal(answer, greedy_of(held.config, whole, answer, size))


def test_a_member_that_was_not_planned_for_does_not_fit() -> None:
    config, tensors = read("qwen2_bias")
    schema = BankSchema.covering(config, 1)
    for untie in (False, True):
        _, wide = widened(tensors, 3, untie)
        with pytest.raises(DoesNotFit, match="3 more vocabulary rows"):
            schema.fit(wide)
