"""From a name to a variant: never a guess, never the base instead, never a path."""

from typing import Any

import pytest

from server.router import InvalidModelName, Router, UnknownModel
from zen_jax.checkpoint.manifest import Variant, VariantNotFound


class Store:
    """Knows one name, in a version that can be raised, and remembers what it was asked."""

    def __init__(self, variant: Variant) -> None:
        self.newest = variant
        self.asked: list[str] = []

    def variant(self, name: str) -> Variant:
        self.asked.append(name)
        if name != self.newest.name:
            raise VariantNotFound(f"/secret/path/{name} is not there")
        return self.newest


def test_the_base_and_a_variant_are_told_apart(fake: Any):
    store = Store(fake.variant("a"))
    router = Router(store)
    assert router.resolve("base") is None
    assert router.resolve("zen4-a") == fake.variant("a")
    assert store.asked == ["zen4-a"]


def test_an_unknown_name_is_refused_without_the_stores_own_words(fake: Any):
    with pytest.raises(UnknownModel, match="no model is called 'zen4-b'") as caught:
        Router(Store(fake.variant("a"))).resolve("zen4-b")
    assert "secret" not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "name",
    ["", "../zen4-a", "zen4-a/1", ".hidden", "zen4-a\n", "zen4 a", "-a", "Ünicode", "x" * 129, "٣"],
)
def test_a_name_that_no_variant_can_have_never_reaches_the_store(name: str, fake: Any):
    store = Store(fake.variant("a"))
    with pytest.raises(InvalidModelName):
        Router(store).resolve(name)
    assert store.asked == []


def test_a_long_name_is_not_repeated_whole(fake: Any):
    with pytest.raises(InvalidModelName) as caught:
        Router(Store(fake.variant("a"))).resolve("x" * 1_000_000)
    assert len(str(caught.value)) < 400


def test_a_version_published_meanwhile_is_found(fake: Any):
    store = Store(fake.variant("a"))
    router = Router(store)
    router.resolve("zen4-a")
    store.newest = fake.variant("a", 2)
    assert router.resolve("zen4-a") == fake.variant("a", 2)
