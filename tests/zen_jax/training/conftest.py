"""A model small enough to train in a second, and words to train it on."""

import jax
import pytest

from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.model import init_params
from zen_jax.training.bytes_tokenizer import VOCAB_SIZE
from zen_jax.training.tasks import Words, split_words


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    return ModelConfig(VOCAB_SIZE, 32, 64, 1, 2, 1, 16, 64, 1e-5, 1e4, True)


@pytest.fixture(scope="session")
def tiny_params(tiny: ModelConfig) -> Params:
    return init_params(tiny, jax.random.key(0))


@pytest.fixture(scope="session")
def words() -> tuple[Words, Words]:
    """(training, held-out) words, made up."""
    vowels, consonants = "aeiou", "bdfglmnprst"
    made = [a + b + c + d for a in consonants for b in vowels for c in consonants for d in vowels]
    return split_words(made)
