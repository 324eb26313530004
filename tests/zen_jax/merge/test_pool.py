"""The pool's table: each policy's choices, limits that hold at every moment, leases."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.merge.pool import (
    Answered,
    Arrival,
    Commit,
    Coverage,
    Delete,
    Held,
    Keep,
    MemberGone,
    NotInPool,
    Pool,
    PoolConfig,
    PoolRefusal,
    Try,
    Wanted,
    coverage,
    least_ratio,
)


def config(policy: str = "gated", adapters: int = 3, bytes: int = 1000, **more) -> PoolConfig:
    return PoolConfig(adapters, bytes, policy, **more)


def arrival(name: str, pool: Pool, alike=None, size: int = 100, digest: str = "") -> Arrival:
    """One whose similarities are `alike` in the order of members, 0 where there is none."""
    found = list(alike or [])
    found += [0.0] * (len(pool.members) - len(found))
    return Arrival(
        Held(name, digest or name, {name: 1.0}),
        size,
        dict.fromkeys(pool.members, size),
        dict(zip(pool.members, found, strict=True)),
    )


def with_members(config: PoolConfig, count: int) -> Pool:
    """A pool with members m0, m1 and so on, each of one adapter a0, a1 of 100 bytes."""
    pool = Pool(dataclasses.replace(config, policy="kmerge"))
    for i in range(count):
        pool, wanted = pool.arrive(arrival(f"a{i}", pool))
        assert wanted == Keep()
        pool, _ = pool.committed(f"m{i}", 100)
    return dataclasses.replace(pool, config=config)


# --- what each policy does


def test_kmerge_fills_places_then_merges_into_the_most_similar() -> None:
    pool = with_members(config("kmerge"), 2)
    assert pool.arrive(arrival("x", pool, [0.9, 0.1]))[1] == Keep()
    pool = with_members(config("kmerge"), 3)
    assert pool.arrive(arrival("x", pool, [-0.3, -0.1, -0.2]))[1] == Commit("m1")


def test_kmerge_plus_opens_a_place_only_if_nothing_is_similar_enough() -> None:
    rule = config("kmerge++", threshold=0.02)
    pool = with_members(rule, 2)
    assert pool.arrive(arrival("x", pool, [0.01, 0.021]))[1] == Commit("m1")
    assert pool.arrive(arrival("x", pool, [0.01, 0.019]))[1] == Keep()
    full = with_members(rule, 3)
    assert full.arrive(arrival("x", full, [0.001, -0.5, 0.0]))[1] == Commit("m0")


@pytest.mark.parametrize("policy", ["kmerge", "kmerge++", "gated"])
def test_an_empty_place_never_matches(policy) -> None:
    """Also when every similarity is negative, where a place's would be 0."""
    pool = with_members(config(policy, threshold=-0.5), 3)
    _, wanted = pool.arrive(arrival("x", pool, [-0.2, -0.1, -0.3]))
    assert wanted in (Commit("m1"), Try("m1"))
    empty = Pool(config(policy, threshold=-1.0))
    assert empty.arrive(arrival("x", empty))[1] == Keep()


def test_the_gate_decides_and_the_next_most_similar_follows_then_a_place() -> None:
    pool = with_members(config(gate=0.9), 2)
    pool, wanted = pool.arrive(arrival("x", pool, [0.1, 0.4]))
    assert wanted == Try("m1")
    assert pool.judged(0.9)[1] == Commit("m1")
    pool, wanted = pool.judged(0.89)
    assert wanted == Try("m0")
    pool, wanted = pool.judged(0.2)
    assert wanted == Keep()
    pool, gone = pool.committed("new", 100)
    assert (list(pool.members), gone) == (["m0", "m1", "new"], ())


def test_where_all_fails_the_refusal_says_why_and_the_pool_is_as_it_was() -> None:
    pool = with_members(config(gate=0.9), 3)
    before = pool
    pool, _ = pool.arrive(arrival("x", pool, [0.3, 0.2, 0.1]))
    pool, _ = pool.judged(0.5)
    pool, _ = pool.judged(0.25)
    with pytest.raises(
        PoolRefusal, match=r"x is not taken in: the merge into m0 keeps 0.50.*all 3 places"
    ):
        pool.judged(0.1)
    assert pool.given_up() == before


def test_a_merge_answers_for_all_that_went_in() -> None:
    pool = with_members(config("kmerge", 1), 1)
    pool, wanted = pool.arrive(arrival("x", pool, [0.5]))
    assert wanted == Commit("m0")
    pool, gone = pool.committed("m1", 90)
    assert gone == (Delete("m0"),)
    assert pool.find("x") == pool.find("a0")
    assert pool.names() == ["a0", "x"]
    assert pool.used == 90
    with pytest.raises(NotInPool, match="'y'"):
        pool.find("y")


def test_who_is_there_already_is_not_taken_in_again() -> None:
    pool = with_members(config(), 1)
    assert pool.arrive(arrival("a0", pool)) == (pool, Answered("m0"))
    with pytest.raises(PoolRefusal, match="a0 is in the pool with other tensors"):
        pool.arrive(arrival("a0", pool, digest="another"))


# --- limits


def test_bytes_of_what_is_written_count() -> None:
    """A merge lies beside what it replaces until the table is changed."""
    pool = with_members(config("kmerge", 2, 299), 2)
    with pytest.raises(PoolRefusal, match="1 bytes are lacking of 299"):
        pool.arrive(arrival("x", pool))
    pool = with_members(config("kmerge", 2, 300), 2)
    pool, _ = pool.arrive(arrival("x", pool, [0.4, 0.1]))
    assert pool.used == 300
    assert pool.committed("new", 100)[0].used == 200


def test_a_member_that_is_too_large_to_merge_is_passed_over() -> None:
    pool = with_members(config("gated", 3, 350), 2)
    asks = dataclasses.replace(
        arrival("x", pool, [0.9, 0.1], size=120), merged={"m0": 160, "m1": 140}
    )
    assert pool.arrive(asks)[1] == Try("m1")


def test_nothing_larger_than_was_reserved_is_committed() -> None:
    pool = Pool(config())
    pool, _ = pool.arrive(arrival("x", pool))
    with pytest.raises(ValueError, match="x1 has 101 bytes; 100 were reserved"):
        pool.committed("x1", 101)


# --- requests


def test_one_in_use_goes_with_its_last_request() -> None:
    pool = with_members(config("kmerge", 1), 1)
    for _ in range(2):
        pool, member = pool.request("a0")
    assert member.leases == 2
    pool, _ = pool.arrive(arrival("x", pool, [0.5]))
    pool, gone = pool.committed("m1", 100)
    assert gone == ()
    assert pool.used == 200
    assert pool.request("a0")[1].id == "m1"
    pool, gone = pool.release("m0")
    assert gone == ()
    pool, gone = pool.release("m0")
    assert gone == (Delete("m0"),)
    assert pool.used == 100
    with pytest.raises(ValueError, match="nobody has a lease on m0"):
        pool.release("m0")


def test_bytes_of_those_that_still_answer_are_lacking_for_a_while_only() -> None:
    pool = with_members(config("kmerge++", 2, 350, threshold=0.5), 1)
    pool, _ = pool.request("a0")
    pool, _ = pool.arrive(arrival("x", pool, [0.9]))
    pool, _ = pool.committed("m1", 100)
    for size, passing in ((151, True), (250, True), (251, False)):
        with pytest.raises(PoolRefusal, match="are lacking of 350") as caught:
            pool.arrive(arrival("y", pool, [0.0], size=size))
        assert caught.value.passing is passing
    pool, _ = pool.release("m0")
    assert pool.arrive(arrival("y", pool, [0.0], size=250))[1] == Keep()


def test_leases_stay_when_another_process_has_changed_the_table() -> None:
    mine = with_members(config("kmerge", 2), 2)
    mine, _ = mine.request("a0")
    mine, _ = mine.request("a1")
    theirs = with_members(config("kmerge", 2), 2)
    theirs, _ = theirs.arrive(arrival("x", theirs, [0.9, 0.1]))
    theirs, _ = theirs.committed("m2", 100)
    pool = mine.seen(theirs)
    assert {id: m.leases for id, m in pool.members.items()} == {"m1": 1, "m2": 0}
    assert {id: m.leases for id, m in pool.leaving.items()} == {"m0": 1}
    assert pool.used == 300
    pool, again = pool.lease("m0")
    assert again.leases == 2
    with pytest.raises(MemberGone, match="m9"):
        pool.lease("m9")
    pool, gone = pool.release("m0")
    assert gone == ()
    assert pool.seen(theirs).leaving["m0"].leases == 1
    pool, gone = pool.release("m0")
    assert gone == (Delete("m0"),)
    assert not pool.seen(theirs).leaving


def test_content_that_comes_again_has_its_leases_still() -> None:
    pool = with_members(config("kmerge++", 3, threshold=0.5), 1)
    pool, _ = pool.request("a0")
    pool, _ = pool.arrive(arrival("x", pool, [0.9]))
    pool, _ = pool.committed("m1", 100)
    pool, _ = pool.arrive(arrival("y", pool, [0.0]))
    pool, gone = pool.committed("m0", 100)
    assert (gone, dict(pool.leaving), pool.members["m0"].leases) == ((), {}, 1)
    assert pool.release("m0")[1] == ()


def test_calls_out_of_turn_are_named() -> None:
    pool = with_members(config(), 1)
    with pytest.raises(ValueError, match="no merge is being tried"):
        pool.judged(1.0)
    with pytest.raises(ValueError, match="nothing is to be committed"):
        pool.committed("x", 1)
    changing, _ = pool.arrive(arrival("x", pool))
    with pytest.raises(ValueError, match="x is being taken in"):
        changing.arrive(arrival("y", pool))
    with pytest.raises(ValueError, match="the similarity to m0 is missing"):
        pool.arrive(dataclasses.replace(arrival("x", pool), similarities={"m0": float("nan")}))


@given(
    st.sampled_from(["kmerge", "kmerge++", "gated"]),
    st.integers(1, 4),
    st.integers(150, 900),
    st.lists(
        st.tuples(
            st.integers(0, 7),  # who
            st.integers(10, 120),  # bytes
            st.lists(st.floats(-1, 1), min_size=4, max_size=4),
            st.lists(st.floats(0, 1.2), min_size=5, max_size=5),
            st.sampled_from(["add", "crash", "ask", "end"]),
        ),
        max_size=30,
    ),
)
def test_whatever_comes_the_limits_hold(policy, adapters, bytes_, steps) -> None:
    pool = Pool(config(policy, adapters, bytes_, threshold=0.0, gate=0.8))
    asked: list[str] = []
    written = 0

    def check(table: Pool) -> Pool:
        assert table.used <= bytes_
        assert len(table.members) <= adapters
        assert len(set(table.names())) == len(table.names())
        assert all(member.leases for member in table.leaving.values())
        return table

    for who, size, alike, ratios, what in steps:
        name = f"a{who}"
        if what == "ask":
            if name in pool.names():
                pool, member = pool.request(name)
                asked.append(member.id)
        elif what == "end" and asked:
            pool, _ = pool.release(asked.pop(0))
        elif what in ("add", "crash"):
            before, wanted = pool, None
            try:
                pool, wanted = pool.arrive(arrival(name, pool, alike[: len(pool.members)], size))
                left = iter(ratios)
                while isinstance(check(pool) and wanted, Try):
                    pool, wanted = pool.judged(next(left))
            except PoolRefusal:
                pool = before
                continue
            pool = _end(pool, wanted, before, what, f"m{written}", size)
            written += 1
        check(pool)


def _end(pool: Pool, wanted: Wanted, before: Pool, what: str, id: str, size: int) -> Pool:
    if isinstance(wanted, Answered):
        assert pool == before
        return pool
    if what == "crash":
        assert pool.given_up() == before
        return before
    pool, gone = pool.committed(id, size)
    merged = isinstance(wanted, Commit)
    assert len(pool.members) == len(before.members) + (not merged)
    assert len(gone) <= merged
    return pool


# --- how well


def test_the_gate_counts_all_tasks_of_all() -> None:
    assert least_ratio({"a": 0.9, "b": 0.4}, {"a": 1.0, "b": 0.5}) == pytest.approx(0.8)
    assert least_ratio({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}) == 1.0
    for merged, single in (({}, {}), ({"a": 1.0}, {"a": 1.0, "b": 1.0})):
        with pytest.raises(ValueError, match="tasks are"):
            least_ratio(merged, single)


def test_coverage_counts_who_is_lacking() -> None:
    found = coverage(["a", "b", "c", "a"], {"a": 0.9, "b": 0.6, "z": 0.1})
    assert found == Coverage(3, 2, pytest.approx(0.5), 0.6)
    assert coverage([], {}) == Coverage(0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"adapters": 0}, "limits are 0"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"gate": 0.0}, "gate is 0.0"),
    ],
)
def test_rules_that_cannot_be(wrong, said) -> None:
    with pytest.raises(ValueError, match=said):
        PoolConfig(**{"adapters": 1, "bytes": 1, **wrong})
