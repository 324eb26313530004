"""kill -9 at random moments of converting, publishing and loading: the store stays whole."""

import subprocess
import sys
from pathlib import Path

from zen_jax.checkpoint.load import bank_schema
from zen_jax.checkpoint.store import Store
from zen_jax.staging import Staging

KILLS, SOAK_KILLS = 5, 50

# One process that forks children, so that what is slow to import is imported once.
SCRIPT = """
import os, random, shutil, signal, sys, time, warnings
from pathlib import Path
from zen_jax.checkpoint.load import bank_schema
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.staging import Staging

warnings.simplefilter("ignore")  # Nothing runs yet when this forks.
base, tuned, path, kills = *map(Path, sys.argv[1:4]), int(sys.argv[4])
draw = random.Random(11)

def publish():
    convert_variant(tuned, path, "one")

def found():
    convert_base(base, path.parent / "new")

def load():
    store = Store(path)
    staging = Staging(store, bank_schema(store, 1))
    for _ in range(3):
        staging.verify(staging.read(store.variant("one")))

def run(action, after):
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    begun = time.monotonic()
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return time.monotonic() - begun, status

actions = (publish, found, load)
takes = {}
for action in actions:
    shutil.rmtree(path.parent / "new", ignore_errors=True)
    takes[action], status = run(action, None)
    assert status == 0, action
died = tries = 0
while died < kills and tries < 4 * kills:
    action = actions[tries % 3]
    shutil.rmtree(path.parent / "new", ignore_errors=True)
    _, status = run(action, draw.uniform(0.0, takes[action]))
    died += status == signal.SIGKILL
    tries += 1
    new = path.parent / "new"
    if (new / "base").exists():
        assert Store(new).verify() == [], "half a base"
    assert Store(path).verify() == [], (tries, action)
print(died)
"""


def test_killed_at_random_moments_the_store_is_whole(
    sources: tuple[Path, Path], store: Store, scale: int
) -> None:
    kills = KILLS if scale == 1 else SOAK_KILLS
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, sources), str(store.path), str(kills)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) == kills, "so many have to die on the way"
    assert store.verify() == []
    staging = Staging(store, bank_schema(store, slots=1))
    for version in store.versions("one"):
        staging.verify(staging.read(store.variant("one", version)))
