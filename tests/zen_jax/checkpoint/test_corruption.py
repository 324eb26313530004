"""Damage of every kind: nothing of a damaged variant gets further than host memory."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zen_jax.checkpoint.load import bank_schema
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt
from zen_jax.checkpoint.store import Store
from zen_jax.staging import Staging

FLIPS, TRUNCATIONS, DELETIONS, EXCHANGES = 150, 20, 20, 10


def flip(files: list[Path], draw: random.Random) -> None:
    path = draw.choice([file for file in files if file.stat().st_size])
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(files: list[Path], draw: random.Random) -> None:
    path = draw.choice([file for file in files if file.stat().st_size])
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def delete(files: list[Path], draw: random.Random) -> None:
    draw.choice(files).unlink()


def exchange(files: list[Path], draw: random.Random) -> None:
    """Two files of one size and other contents change places, where there are such."""
    while True:
        one, other = draw.sample(files, 2)
        a, b = one.read_bytes(), other.read_bytes()
        if a != b:
            one.write_bytes(b)
            other.write_bytes(a)
            return


def load(store: Store, name: str) -> Variant:
    """The way of a load up to the device."""
    variant = store.variant(name)
    staging = Staging(store, bank_schema(store, slots=1))
    staging.verify(staging.read(variant))
    return variant


@pytest.mark.parametrize(
    ("damage", "count"),
    [(flip, FLIPS), (truncate, TRUNCATIONS), (delete, DELETIONS), (exchange, EXCHANGES)],
)
def test_every_one_of_200_damages_is_refused_before_anything_reaches_a_device(
    damage: Callable[[list[Path], random.Random], None],
    count: int,
    ready: Path,
    store: Store,
    scale: int,
):
    folder = load(store, "one").path
    whole = ready / folder.relative_to(store.path)
    draw = random.Random(7)
    refused = 0
    for _ in range(count * scale):
        damage([path for path in sorted(folder.rglob("*")) if path.is_file()], draw)
        with pytest.raises(VariantCorrupt):
            load(store, "one")
        refused += 1
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
    assert refused == count * scale
    load(store, "one")  # the store was whole again each time
