"""`zen pool`: a pool is made, filled, listed, simulated; bad input is one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from server import cli
from server.app import running
from server.client import AsyncZenClient, ZenError
from server.serve_options import ServeOptions
from zen_jax.checkpoint.manifest import VariantCorrupt
from zen_jax.checkpoint.peft import open_adapter, read_factors
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.layout import fuse
from zen_jax.merge.pool_folder import PoolFolder, parse_member
from zen_jax.merge.pool_memory import pool_bytes
from zen_jax.model import make_forward
from zen_jax.pool_store import PoolStore
from zen_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("compiled")

MEAN = ("--budget-bytes", "1MiB", "--operation", "mean_delta", "--split", "doc")


def test_a_pool_from_first_to_last(zen, adapters, tiny_store, tmp_path):
    pool, store = tmp_path / "pool", ("--store", tiny_store)
    options = ("--budget-bytes", "1MiB", "--adapters", 2, "--policy", "kmerge++")
    status, out, _ = zen("add", pool, adapters / "a", *store, *options, "--threshold", 0.5)
    assert status == 0
    assert out.startswith("a is kept as ")
    status, out, _ = zen("add", pool, adapters / "b", *store, "--json")
    change = json.loads(out)
    assert (change["what"], change["together"]) == ("merged", ["a"])
    assert change["similarity"] > 0.99
    assert zen("add", pool, adapters / "c", *store, "--name", "see")[1].startswith("see is kept")
    listed = json.loads(zen("ls", pool, "--json")[1])
    assert [member["answers for"] for member in listed["members"]] == [["a", "b"], ["see"]]
    assert listed["limits"]["policy"] == "kmerge++"
    assert "2 of 2 members" in zen("ls", pool)[1]
    shown = json.loads(zen("show", pool, "b", "--json")[1])
    assert shown["together with"] == ["a"]
    assert "together with: nobody" in zen("show", pool, "see")[1]
    assert "b is there already" in zen("add", pool, adapters / "b", *store)[1]
    for wrong, said in (
        (("add", pool, adapters / "a", *store, "--adapters", 3), "leave out --adapters"),
        (("add", tmp_path / "new", adapters / "a", *store), "give --budget-bytes"),
        (("add", pool, tmp_path, *store), "has no adapter_config.json"),
        (("add", tmp_path / "n", adapters / "a", *store, *MEAN), "--split is for opcm"),
        (("show", pool, "nobody"), "answers for 'nobody'"),
        (("ls", tmp_path / "no"), "is no pool"),
    ):
        status, _, err = zen(*wrong)
        assert (status, err.count("\n")) == (2, 1)
        assert said in err


def test_opcm_takes_either_rule_for_its_block(zen, adapters, tiny_store, tmp_path):
    pool, options = tmp_path / "pool", ("--store", tiny_store, "--budget-bytes", "1MiB")
    assert zen("add", pool, adapters / "a", *options, "--split", "doc")[0] == 0
    limits = json.loads(zen("ls", pool, "--json")[1])["limits"]
    assert (limits["operation"], limits["split"]) == ("opcm", "doc")


def test_a_simulation(zen, adapters, tiny_store):
    options = ("--store", tiny_store, "--adapters", 2, "--policy", "kmerge", "--order", 1)
    status, out, _ = zen("simulate", adapters, *options, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["coverage"]["answered"] == 3
    assert len(found["members"]) == 2
    assert "3 of 3 are answered by 2 members" in zen("simulate", adapters, *options)[1]


# --- served


async def test_each_adapter_is_answered_by_the_merge_that_holds_it(
    zen, adapters, tiny_store, tmp_path, eventually
):
    """Also one that is merged away while it answers: its file stays until the last token."""
    path, store = tmp_path / "pool", ("--store", tiny_store)
    options = ("--budget-bytes", "1MiB", "--adapters", 2, "--policy", "kmerge++")
    assert zen("add", path, adapters / "a", *store, *options, "--threshold", 0.5)[0] == 0
    assert zen("add", path, adapters / "c", *store)[0] == 0
    held = PoolStore(tiny_store, path)
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with running(held, ServeOptions(port=0, rows=4, max_length=64)) as server:
        async with AsyncZenClient(server.address) as client:
            before = await client.generate("a", "table", **sampling)
            other = await client.generate("c", "table", **sampling)
            base = await client.generate("base", "table", **sampling)
            leaving, release = held.leased("a")
            gone = PoolFolder(path).member_path(leaving.digest)
            assert zen("add", path, adapters / "b", *store)[0] == 0
            assert "(1 evicted that still answer" in zen("ls", path)[1]
            _, data = held.read_member(leaving)
            assert parse_member(data, leaving.digest).count == 1
            release()
            eventually(lambda: not gone.exists())
            assert "evicted" not in zen("ls", path)[1]
            with pytest.raises(VariantCorrupt, match="was evicted"):
                held.read_member(leaving)
            a, b = [await client.generate(name, "table", **sampling) for name in "ab"]
            assert a.completion.model.name == "a"
            assert list(a.completion.model.merged_of) == ["a", "b"]
            assert list(before.completion.model.merged_of) == ["a"]
            assert a.completion.model.digest == b.completion.model.digest
            assert a.completion.model.digest != before.completion.model.digest
            assert a.token_ids == b.token_ids
            with pytest.raises(ZenError, match="no model is called 'nobody'"):
                await client.generate("nobody", "table", **sampling)
            names = {v.name for v in (await client.list_variants()).variants}
            assert names >= {"a", "b", "c"}
    for answer, name in ((other, "c"), (before, "a")):
        whole = _materialised(tiny_store, adapters / name)
        assert answer.token_ids[0] == whole
    assert base.token_ids != before.token_ids or base.token_ids != other.token_ids


def _materialised(store: Path, adapter: Path) -> int:
    """The likeliest token after "table" of the base with an adapter's product added up whole."""
    base = Store(store)
    shapes = {name: entry.shape for name, entry in base.base().tensors.items()}
    factors = read_factors(open_adapter(adapter, shapes))
    tensors = {name: value.astype(np.float32) for name, value in base.base_tensors()}
    for name, pair in factors.items():
        tensors[name] = tensors[name] + pair.dense().astype(np.float32)
    config = base.base().config
    tokens = np.array([Tokenizer.from_folder(base.tokenizer_folder(None)).encode("table")])
    return int(np.argmax(make_forward(config)(fuse(config, tensors), tokens)[0, -1]))


def test_a_budget_holds_the_base_and_some_members(zen, adapters, tiny_store, tmp_path):
    path, store = tmp_path / "pool", ("--store", tiny_store)
    zen("add", path, adapters / "a", *store, "--budget-bytes", "1MiB", "--adapters", 4)
    whole, each = pool_bytes(Store(tiny_store).base().config, 2)
    assert PoolStore(tiny_store, path).schema().slots == 4
    assert PoolStore(tiny_store, path, whole + 3 * each - 1).schema().slots == 2
    with pytest.raises(ValueError, match="is too small: the base takes"):
        PoolStore(tiny_store, path, whole + each - 1).schema()
    status = cli.run(["serve", str(tiny_store), "--budget-bytes", "1MiB"])
    assert status == 2


def test_what_sixteen_gb_hold():
    """A base of 8B in bfloat16 does not fit beside anything; 7B leaves room for 8 profiles."""
    config = ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_position=4096,
    )
    whole, each = pool_bytes(config, 8)
    assert whole == 2 * 6_738_415_616
    # a and b of q, k, v, o and of gate, up, down; fused weights hold b at the ranks of all.
    thin = 8 * 4096 * (3 + 1 + 2) + 8 * 11008 + 8 * 4096 * (3 * 3 + 1 + 1) + 2 * 8 * 11008 * 2
    assert each == 4 * 32 * thin + 4
    assert whole + 8 * each < 16e9
