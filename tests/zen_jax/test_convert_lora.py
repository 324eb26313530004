"""LoRA adapters as variants: their logits are PEFT's, and they go back to PEFT as they came.

The reference was computed by PEFT in float64 (tests/golden/make_lora_goldens.py), so what is
measured is float32 rounding alone, over the largest logit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from zen_jax.checkpoint.load import bank_schema
from zen_jax.checkpoint.manifest import Manifest
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base
from zen_jax.convert_lora import convert_lora, export_lora
from zen_jax.delta.apply import bind, materialise
from zen_jax.merge.sources import open_member
from zen_jax.model import make_forward
from zen_jax.sharding import make_mesh
from zen_jax.staging import Staging

GOLDEN = Path(__file__).parents[1] / "golden"
BASES = {
    "one": "llama_tied",
    "two": "llama_tied",
    "patterns": "llama_tied",
    "rslora_regex": "qwen2_bias",
    "embedding": "llama_tied",
}
# Twice what was measured on x86-64.
ERROR = 6e-6


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """A store of each golden base with the golden adapters of it; not to be changed."""
    root = tmp_path_factory.mktemp("lora")
    for base in set(BASES.values()):
        convert_base(GOLDEN / base, root / base)
    for name, base in BASES.items():
        convert_lora(GOLDEN / "lora" / name, root / base, name)
    return {base: Store(root / base) for base in BASES.values()}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "lora" / name / "golden.npz") as values:
        return dict(values)


def off(found: Any, wanted: np.ndarray) -> float:
    """The largest difference over the largest value."""
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_peft(stores: dict[str, Store], name: str) -> None:
    values, store = golden(name), stores[BASES[name]]
    held = bank_schema(store).held
    base = held.fuse_base(dict(store.base_tensors()))
    deltas = held.fuse_variant(store.read_variant(store.variant(name)))
    forward = make_forward(held.config)
    assert off(values["logits"], values["base"]) > 0.5  # the adapter does something
    assert off(forward(bind(base, deltas), values["tokens"]), values["logits"]) < ERROR
    assert off(forward(materialise(base, deltas), values["tokens"]), values["logits"]) < ERROR
    assert off(forward(base, values["tokens"]), values["base"]) < ERROR


def test_rows_of_adapters_and_of_the_base_in_one_batch(stores: dict[str, Store]) -> None:
    """Each row is its own adapter's, fused as materialised, on one device and on eight."""
    store, names = stores["llama_tied"], ["one", "patterns", "embedding"]
    schema = bank_schema(store, len(names))
    held = schema.held
    base = held.fuse_base(dict(store.base_tensors()))
    slots = [schema.fit(store.read_variant(store.variant(name))) for name in names]
    stack = jax.tree.map(lambda *parts: jnp.stack([jnp.asarray(p) for p in parts]), *slots)
    order = jnp.array([1, -1, 0, 2, 1])
    tokens = np.concatenate([golden(n)["tokens"][:1] for n in ("patterns", "one", "one")])
    tokens = np.concatenate([tokens, golden("embedding")["tokens"][:1], tokens[:1]])
    bound = bind(base, stack.weights, order)
    logits = jax.jit(make_forward(held.config))(bound, tokens)
    for row, name in ((0, "patterns"), (2, "one"), (3, "embedding"), (4, "patterns")):
        assert off(logits[row], golden(name)["logits"][0]) < ERROR
    assert off(logits[1], golden("one")["base"][0]) < ERROR
    np.testing.assert_array_equal(logits[0], logits[4])
    whole = materialise(base, jax.tree.map(lambda part: part[0], stack).weights)
    assert off(make_forward(held.config)(whole, tokens[2:3])[0], np.asarray(logits[2])) < ERROR
    sharded = jax.jit(make_forward(held.config, make_mesh(model=2)))(bound, tokens)
    assert off(sharded, np.asarray(logits)) < ERROR


def test_a_slot_is_as_it_is_without_a_mesh(stores: dict[str, Store], devices: list[Any]) -> None:
    """What each device of a mesh is staged with, put together, is the slot of one device."""
    from zen_jax.sharding import Placement

    store = stores["llama_tied"]
    schema = bank_schema(store, 2)
    variant = store.variant("patterns")
    placed = Placement.of(schema.held.config, make_mesh(model=2))
    one, two = (Staging(store, schema, place) for place in (None, placed))
    for here, there in zip(
        jax.tree.leaves(one.verify(one.read(variant))),
        jax.tree.leaves(two.verify(two.read(variant))),
        strict=True,
    ):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("name", BASES)
def test_back_to_peft_unchanged(stores: dict[str, Store], name: str, tmp_path: Path) -> None:
    store = stores[BASES[name]]
    export_lora(store, store.variant(name), tmp_path / "out")
    came, went = GOLDEN / "lora" / name, tmp_path / "out"
    before, after = (load_file(path / "adapter_model.safetensors") for path in (came, went))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        np.testing.assert_array_equal(value, after[key])
    texts = [(path / "adapter_config.json").read_text() for path in (came, went)]
    assert json.loads(texts[0]) == json.loads(texts[1])
    assert convert_lora(went, store.path, "again").digest == store.variant(name).digest


def test_a_store_with_adapters_is_whole_and_named(stores: dict[str, Store]) -> None:
    store = stores["qwen2_bias"]
    assert store.verify() == []
    manifest = store.manifest(store.variant("rslora_regex"))
    assert Manifest.parse(manifest.render()) == manifest
    policies = {name: entry.policy for name, entry in manifest.tensors.items()}
    assert policies["model.layers.0.self_attn.k_proj.weight"] == "low_rank"
    assert (
        policies["lm_head.weight"] == policies["model.layers.1.input_layernorm.weight"] == "dense"
    )
    assert policies["model.layers.0.self_attn.q_proj.weight"] == "shared"


def test_what_merging_reads_of_an_adapter_has_its_scale(stores: dict[str, Store]) -> None:
    store = stores["llama_tied"]
    source = open_member(f"{store.path}:one")
    name = "model.layers.1.mlp.down_proj.weight"
    file = load_file(GOLDEN / "lora" / "one" / "adapter_model.safetensors")
    a, b = (file[f"base_model.model.{name[:-7]}.lora_{x}.weight"] for x in "AB")
    whole = store.base_tensor(name).astype(np.float32) + 2 * b @ a  # alpha / r = 8 / 4
    np.testing.assert_allclose(source.read(name), whole, rtol=1e-6, atol=1e-6)


# --- what is refused, by name


def changed(tmp_path: Path, **settings: Any) -> Path:
    """The adapter "one" with other settings."""
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "lora" / "one", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora is set; DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"init_lora_weights": "pissa"}, "changes the base's own weights"),
        ({"peft_type": "VERA"}, "peft_type is 'VERA'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which this version does not compute"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"some_new_idea": 3}, "some_new_idea is 3"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 8}, r"has factors \(4, 48\) and \(48, 4\); adapter_config.json says \(8, 48\)"),
        ({"rank_pattern": {"down_proj": 2}}, "down_proj.weight has factors"),
        ({"alpha_pattern": {"down_proj": "many"}}, "has alpha 'many'"),
        ({"target_modules": ["q_proj"]}, "has factors; target_modules does not name it"),
        (
            {"target_modules": r".*_proj", "exclude_modules": ["up_proj"]},
            "up_proj.weight has factors",
        ),
        ({"layers_to_transform": [0]}, "layers.1.*does not name it"),
        ({"target_modules": "(("}, "has a pattern that is none"),
        ({"target_modules": "a" * 2000}, "a pattern of 2000 characters"),
        ({"modules_to_save": ["lm_head"]}, "lm_head of modules_to_save is not in the file"),
        ({"target_modules": None}, "target_modules is no list"),
    ],
)
def test_refused_by_name(
    stores: dict[str, Store], tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        convert_lora(changed(tmp_path, **settings), stores["llama_tied"].path, "no")
    assert "no" not in stores["llama_tied"].names()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"),
            "one of its",
        ),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": np.ones((4, 48))}
            ),
            "layers.7.* belongs to no weight|is F64",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": np.ones(
                        72, np.float32
                    )
                }
            ),
            "lora_magnitude_vector belongs to no weight",
        ),
        (
            lambda t: t["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].fill(np.nan),
            "up_proj.weight lora_a has 192 of 192 values",
        ),
        (lambda t: t.clear(), "lacks factors; target_modules names it"),
    ],
)
def test_files_that_do_not_fit(
    stores: dict[str, Store], tmp_path: Path, change: Any, said: str
) -> None:
    folder = changed(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(SourceError, match=said):
        convert_lora(folder, stores["llama_tied"].path, "no")


def test_an_embedding_beside_factors_has_to_be_the_bases(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "lora" / "embedding", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.base_layer.weight"][3, 3] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="it belongs to another base"):
        convert_lora(folder, stores["llama_tied"].path, "no")


def test_all_linear_leaves_embedding_and_head_out(stores: dict[str, Store], tmp_path: Path) -> None:
    folder = changed(tmp_path, target_modules="all-linear")
    assert convert_lora(folder, stores["llama_tied"].path, "linear").stats["low_rank"] == 14
