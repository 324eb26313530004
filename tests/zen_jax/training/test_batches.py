"""Batches: what counts in the loss, and where windows of text begin and end."""

import numpy as np
import pytest

from zen_jax.training.batches import example_batch, held_out_windows, prompt_ids, text_batch
from zen_jax.training.bytes_tokenizer import BOS, EOS, PAD
from zen_jax.training.corpora import Corpus
from zen_jax.training.tasks import Example


def test_only_the_answer_and_its_end_count() -> None:
    batch = example_batch([(Example("ab", "AB"), (259, 117))], 10)
    expected = [BOS, 259, 117, 97, 98, 10, 65, 66, EOS, PAD, PAD]
    assert batch.tokens.tolist() == [expected]
    counted = batch.tokens[0, 1:][batch.weights[0] > 0]
    assert counted.tolist() == [65, 66, EOS]


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="10 tokens; there is room for 6"):
        example_batch([(Example("abc", "ABCD"), ())], 5)


def test_prompt_of_a_variant_has_no_tag() -> None:
    assert prompt_ids("é") == [BOS, 0xC3, 0xA9, 10]


@pytest.fixture
def corpus() -> Corpus:
    lines = b"".join(b"line %03d\n" % i for i in range(100))
    return Corpus("lines", (lines,), (lines.upper(),), "")


def test_windows_start_at_lines(corpus: Corpus) -> None:
    batch = text_batch([corpus], [1.0], np.random.default_rng(0), (16, 40))
    assert (batch.tokens[:, 0] == BOS).all()
    assert {bytes(row[1:6].tolist()) for row in batch.tokens} == {b"line "}
    assert (batch.weights[batch.tokens[:, 1:] == PAD] == 0).all()
    assert batch.weights.sum() > 0.9 * batch.weights.size


def test_a_document_ends_with_the_end_token() -> None:
    corpus = Corpus("short", (b"ten bytes\n",), (b"",), "")
    batch = text_batch([corpus], [1.0], np.random.default_rng(0), (1, 20))
    assert batch.tokens[0, :12].tolist() == [BOS, *b"ten bytes\n", EOS]
    assert batch.weights[0].sum() == 11


def test_held_out_windows_are_full_and_from_held_out_text(corpus: Corpus) -> None:
    windows = held_out_windows(corpus, 5, 30, 1)
    assert windows.shape == (5, 31)
    assert {bytes(row[1:6].tolist()) for row in windows} == {b"LINE "}
    assert (windows == held_out_windows(corpus, 5, 30, 1)).all()


def test_held_out_text_that_is_too_short(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="no held-out document of more than 5000 bytes"):
        held_out_windows(corpus, 5, 5000, 1)
