"""Random schedules of the whole way, router to device: everybody is answered, nothing is left."""

import logging
from collections import Counter
from typing import Any

import pytest

SCHEDULES = 2000
SOAK_SCHEDULES = 100_000
BLOCKS = 40


@pytest.mark.parametrize("block", range(BLOCKS))
def test_any_schedule_answers_everyone_rightly_and_leaves_nothing(
    block: int, new_world: Any, what_happened: Any, scale: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    reached: Counter[str] = Counter()
    count = (SCHEDULES if scale == 1 else SOAK_SCHEDULES) // BLOCKS
    for seed in range(block * count, (block + 1) * count):
        world = new_world(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"in schedule {seed}")
            raise
        reached.update(what_happened(world))
    # The schedules are of use only while they reach all this.
    assert reached["length"] > 3 * count
    assert reached["writes"] > count
    for kind in ("stop", "cancelled", "deadline", "gone", "withdrawn"):
        assert reached[kind] > count / 10, reached
    for kind in ("load_failed", "timed_out", "corrupt"):
        assert reached[kind] > count / 10, reached
    for kind in ("later parts", "prompts together", "steps together", "found"):
        assert reached[kind] > count / 10, reached
    assert reached["displaced"] > count / 100, reached
