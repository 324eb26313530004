"""A server that is killed while it takes an adapter in, at random moments."""

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from server.client import AsyncZenClient, ZenError
from server.client_retries import Retries
from zen_jax.merge.pool_folder import PoolFolder


async def ask(address: str) -> None:
    """Both at once; nobody is there to answer once it is killed."""
    async with AsyncZenClient(address, Retries(attempts=1)) as client:
        streams = (client.generate(name, "table", max_tokens=4) for name in "bc")
        answers = await asyncio.gather(*streams, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                assert isinstance(answer, ZenError)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_kill_9_leaves_the_pool_before_or_after(
    zen, adapters, tiny_store, tmp_path, compiled, scale
):
    rng = random.Random(11)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    for i in range(3 if scale == 1 else 12):
        pool, folder = tmp_path / f"pool{i}", tmp_path / f"adapters{i}"
        first = ("--store", tiny_store, "--budget-bytes", "1MiB", "--adapters", 2)
        assert zen("add", pool, adapters / "a", *first)[0] == 0
        for name in "bc":
            shutil.copytree(adapters / name, folder / name)
        arguments = ("serve", tiny_store, "--pool", pool, "--adapters", folder, "--port", 0)
        arguments += ("--rows", 2, "--max-length", 64)
        process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        ready = re.fullmatch(r"ready on (\S+): base, a, b, c\n", process.stdout.readline())
        assert ready
        waiting = rng.uniform(0.05, 4.0)

        async def killed(address: str, after_s: float, process: subprocess.Popen[str]) -> None:
            asked = asyncio.create_task(ask(address))
            # Not a wait for something: the moment of the kill, anywhere in the two intakes.
            await asyncio.to_thread(time.sleep, after_s)
            process.kill()
            await asked

        asyncio.run(killed(ready[1], waiting, process))
        process.communicate()
        of = PoolFolder(pool)
        _, table = of.read()
        assert table.names()[0] == "a" and set(table.names()) <= {"a", "b", "c"}
        assert of.verify() == []
        files = sum(f.stat().st_size for f in pool.rglob("*") if f.is_file())
        assert max(table.used, files) <= table.config.bytes
        for name in "bc":  # whatever it left is swept, and the rest comes in
            assert zen("add", pool, adapters / name, "--store", tiny_store)[0] == 0
        table = of.read()[1]
        assert not table.leaving
        assert {f.stem for f in (pool / "members").iterdir()} == set(table.members)
