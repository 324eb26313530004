"""What every test runs under: JAX on eight devices of the CPU, and one size of random trial.

JAX reads its environment once, when it is first imported. Nothing imports it before this module.
"""

import os
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
