"""What every test runs under: JAX on eight devices of the CPU, and one size of random trial.

JAX reads its environment once, when it is first imported. Nothing imports it before this module.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES_FLAG = "--xla_force_host_platform_device_count"
if DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES_FLAG}=8".strip()

# The same examples at every run, so that a failure is a change of the code; a soak looks for new
# ones.
hypothesis.settings.register_profile("test", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True)
SOAK_SCALE = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --soak."""
    parser.addoption(
        "--soak", action="store_true", help="run the long tests too, all at larger counts"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses how many examples Hypothesis tries."""
    hypothesis.settings.load_profile("soak" if config.getoption("--soak") else "test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `soak` unless --soak asks for them."""
    if config.getoption("--soak"):
        return
    long = [item for item in items if item.get_closest_marker("soak")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> int:
    """Factor on counts of random trials: 1, or 20 under --soak."""
    return SOAK_SCALE if pytestconfig.getoption("--soak") else 1


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    """The CPU devices, eight of them, for meshes."""
    import jax

    found = jax.devices("cpu")
    if len(found) < 8:
        pytest.fail(
            f"{len(found)} CPU devices; expected 8: JAX was imported before tests/conftest.py"
        )
    return found


# A model of random weights, in files: for the server's tests.


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What XLA compiles is kept for the session, for every engine of the same sizes."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = tmp_path_factory.mktemp("compiled")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of a base and of its fine-tunes tiny-a, tiny-b and tiny-c."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from zen_jax.config import ModelConfig
    from zen_jax.layout import tensor_shapes
    from zen_jax.training.bytes_tokenizer import VOCAB_SIZE, write_tokenizer

    tiny = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=256,
        tie_word_embeddings=True,
    )
    rng = np.random.default_rng(3)
    root = tmp_path_factory.mktemp("tiny")
    base = {
        name: np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)
        for name, shape in tensor_shapes(tiny).items()
    }
    folders = {}
    for name in ("base", "tiny-a", "tiny-b", "tiny-c"):
        size = 0.0 if name == "base" else 0.1
        tensors = {
            key: (w + rng.normal(0, size, w.shape)).astype(ml_dtypes.bfloat16)
            for key, w in base.items()
        }
        folders[name] = root / name
        folders[name].mkdir()
        save_file(tensors, folders[name] / "model.safetensors")
        (folders[name] / "config.json").write_text(json.dumps(tiny.to_hf()))
        write_tokenizer(folders[name], tiny.max_position)
    return folders


@pytest.fixture(scope="session")
def tiny_store(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of them; not to be changed."""
    from zen_jax.convert import convert_base, convert_variant

    store = tmp_path_factory.mktemp("store") / "tiny"
    convert_base(tiny_folders["base"], store)
    for name in ("tiny-a", "tiny-b", "tiny-c"):
        convert_variant(tiny_folders[name], store, name)
    return store
