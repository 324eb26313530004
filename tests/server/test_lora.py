"""LoRA adapters by command and over gRPC: beside 1-bit variants and the base, in one batch."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from server import cli
from server.app import ZenServer, running
from server.client import AsyncZenClient
from server.serve_options import ServeOptions
from zen_jax.checkpoint.peft import write_adapter
from zen_jax.checkpoint.store import Store
from zen_jax.merge.sources import open_member

pytestmark = pytest.mark.usefixtures("compiled")

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


def adapter(folder: Path, base: Path, seed: int, rank: int) -> Path:
    """A random adapter of a tiny base, large enough that answers change."""
    rng, shapes = np.random.default_rng(seed), load_file(base / "model.safetensors")
    factors = {}
    for module in MODULES:
        name = f"model.layers.0.{module}.weight"
        rows, size = shapes[name].shape
        pair = rng.normal(0, 0.4, (rank, size)), rng.normal(0, 0.4, (rows, rank))
        factors[name] = pair[0].astype(np.float32), pair[1].astype(np.float32)
    write_adapter(folder, factors, rank=rank, alpha=2.0 * rank)
    return folder


@pytest.fixture(scope="module")
def store(
    tiny_store: Path, tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny family with two adapters of different ranks."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(tiny_store, folder / "store")
    for seed, (name, rank) in enumerate({"thin": 1, "thick": 3}.items()):
        source = adapter(folder / name, tiny_folders["base"], seed, rank)
        assert cli.run(["convert", "lora", str(source), str(folder / "store"), name]) == 0
    return folder / "store"


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[ZenServer]:
    with running(Store(store), ServeOptions(port=0, rows=8, max_length=64)) as server:
        yield server


async def test_adapters_bits_and_base_at_once_equal_each_alone(server):
    models = ["base", "tiny-a", "thin", "thick", "tiny-b", "thin"]
    prompts = ["table", "a longer prompt for the others", "x", "table", "table", "longer by far"]
    async with AsyncZenClient(server.address) as client:

        async def ask(model: str, prompt: str) -> tuple[list[int], str]:
            options = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.8, "seed": 5}
            answer = await client.generate(model, prompt, **options)
            return answer.token_ids, answer.completion.model.name

        compiled = server.engine.compiles
        alone = [await ask(*pair) for pair in zip(models, prompts, strict=True)]
        together = await asyncio.gather(*map(ask, models, prompts))
        same_prompt = [(await ask(model, "table"))[0] for model in models[:4]]
    assert together == alone
    assert [name for _, name in alone] == models
    assert len({tuple(tokens) for tokens in same_prompt}) == 4
    assert server.engine.compiles == compiled


async def test_an_adapter_answers_as_the_weights_that_it_means(server, store):
    """The first token's probability is that of W + alpha / r b a, added up by another way."""
    import jax

    from zen_jax.layout import fuse
    from zen_jax.model import make_forward

    source = open_member(f"{store}:thick")
    params = fuse(source.config, {name: source.read(name) for name in source.tensors})
    async with AsyncZenClient(server.address) as client:
        answer = await client.generate(
            "thick", "table", max_tokens=1, temperature=0.0, logprobs=3, ignore_eos=True
        )
    ids = server.store.tokenizer_folder(None)
    from zen_jax.tokenizer import Tokenizer

    tokens = np.array([Tokenizer.from_folder(ids).encode("table")], np.int32)
    logits = make_forward(source.config)(params, tokens)[0, -1]
    wanted = jax.nn.log_softmax(logits)
    assert answer.token_ids[0] == int(np.argmax(wanted))
    for token, value in zip(
        answer.logprobs[0].top_ids, answer.logprobs[0].top_logprobs, strict=True
    ):
        assert value == pytest.approx(float(wanted[token]), abs=2e-5)


def test_by_command_and_back(store, tmp_path, capsys):
    came = store.parent / "thick"
    assert cli.run(["convert", "peft", str(store), "thick", str(tmp_path / "out")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (came / name).read_bytes()
    assert cli.run(["ls", str(store), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert {"thin", "thick"} <= {row["name"] for row in listed["variants"]}
    assert cli.run(["verify", str(store)]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lora", "missing", "STORE", "x"), "missing: is not a folder"),
        (("lora", "ADAPTER", "STORE", "../x"), "is not a variant's name"),
        (("peft", "STORE", "tiny-a", "OUT"), "tiny-a/1 was made of a whole checkpoint"),
        (("peft", "STORE", "thin", "ADAPTER"), "exists already"),
    ],
)
def test_bad_input_is_one_line(store, tmp_path, capsys, arguments, said):
    places = {"STORE": store, "ADAPTER": store.parent / "thin", "OUT": tmp_path / "out"}
    words = [str(places.get(word, word)) for word in arguments]
    assert cli.run(["convert", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
