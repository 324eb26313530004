"""The twelve adapters: a few steps of a tiny base give a folder that PEFT's reader takes, and a run
that was interrupted ends with the same bytes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from zen_jax.checkpoint.peft import open_adapter, read_factors
from zen_jax.layout import tensor_shapes
from zen_jax.merge.pool_simulate import read_newcomers
from zen_jax.training import adapters, residual, tasks
from zen_jax.training.batches import Batch
from zen_jax.training.bytes_tokenizer import EOS, decode
from zen_jax.training.tasks import Words

NAME = "rot13-german"


@pytest.fixture
def run(tiny_folders, words, monkeypatch, tmp_path):
    """Runs the command: its status."""
    few = dataclasses.replace(adapters.SETTINGS, steps=6, warmup=1, checkpoint_every=2)
    monkeypatch.setattr(adapters, "SETTINGS", few)
    monkeypatch.setattr(adapters, "ROWS", 4)
    monkeypatch.setattr(adapters, "EXAMPLES", 5)
    # No text is fetched, and what is compiled is not kept here.
    monkeypatch.setattr(adapters, "words_of", lambda text, cache: words)
    monkeypatch.setattr(adapters, "remember_compilations", lambda folder: None)
    family = tiny_folders["base"].parent

    def run(out: Path, *names: str) -> int:
        given = [str(out), "--family", str(family), "--quiet", "--only", *names]
        return adapters.main(given)

    return run


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_an_adapter_is_trained_and_read_back(run, tiny_folders, tmp_path):
    assert run(tmp_path, NAME) == 0
    made = files(tmp_path / NAME)
    assert set(made) == {"adapter_config.json", "adapter_model.safetensors", "tasks.json"}
    config, base = residual.read_folder(tiny_folders["base"])
    shapes = tensor_shapes(config)
    factors = read_factors(open_adapter(tmp_path / NAME, shapes))
    assert set(factors) == {name for name in base if "_proj" in name}
    for name, pair in factors.items():
        assert pair.a.shape == (8, shapes[name][1])
        assert pair.b.shape == (shapes[name][0], 8)
        assert np.abs(pair.b).max() > 0  # b starts at 0: it has learnt something
    fields = json.loads(made["tasks.json"])
    assert fields["metric"] == "exact" and len(fields["examples"]) == 5
    for prompt, answer in fields["examples"]:
        word = decode(prompt).removesuffix("\n")
        assert decode(answer) == tasks.rot13(word) and answer[-1] == EOS
        assert tasks.held_out(word)
    (newcomer,) = read_newcomers(tmp_path, shapes)
    assert newcomer.name == NAME


def test_what_is_finished_stays_and_the_rest_is_made(run, tmp_path):
    assert run(tmp_path, NAME) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / NAME).iterdir()}
    assert run(tmp_path, NAME, "sort-french") == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / NAME).iterdir()}
    assert (tmp_path / "sort-french").is_dir()
    first, second = files(tmp_path / NAME), files(tmp_path / "sort-french")
    assert first["adapter_model.safetensors"] != second["adapter_model.safetensors"]


def test_one_that_was_interrupted_ends_with_the_same_bytes(run, monkeypatch, tmp_path):
    assert run(tmp_path / "whole", NAME) == 0
    make, steps = adapters.recipe.variant_batches, list[int]()

    def breaking(variant, seen: Words, text):
        batches = make(variant, seen, text)

        def batch(step: int) -> tuple[Batch, ...]:
            steps.append(step)
            if step == 4 and steps.count(4) == 1:
                raise KeyboardInterrupt
            return batches(step)

        return batch

    monkeypatch.setattr(adapters.recipe, "variant_batches", breaking)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", NAME)
    assert not (tmp_path / "cut" / NAME).exists()
    assert run(tmp_path / "cut", NAME) == 0
    assert steps == [0, 1, 2, 3, 4, 4, 5]  # from its checkpoint on
    assert files(tmp_path / "cut" / NAME) == files(tmp_path / "whole" / NAME)
    assert not list((tmp_path / "cut" / "work").glob("*.safetensors"))


def test_bad_input_is_one_line(run, tmp_path, capsys):
    assert run(tmp_path, "rot13-latin") == 2
    err = capsys.readouterr().err
    assert "no adapter is called 'rot13-latin'" in err and err.count("\n") == 1
