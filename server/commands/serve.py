"""`zen serve`: a store is served until a signal comes."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from server import app, console
from server.call_log import LogFormat, Seldom, WithRequest, formatter
from server.connections import raise_limit
from server.log_queue import Lines, Onto
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store
from zen_jax.pool_store import PoolStore


def run(
    path: Path,
    options: ServeOptions,
    log_format: LogFormat = "text",
    pool: Path | None = None,
    budget: int | None = None,
    adapters: Path | None = None,
) -> bool:
    """Serves a store, or its base with a pool within a budget that takes adapters in; returns
    whether every request that was taken finished."""
    for option, given in (("--budget-bytes", budget), ("--adapters", adapters)):
        if pool is None and given is not None:
            raise ValueError(f"{option} is for a pool; give --pool too")
    store = Store(path) if pool is None else PoolStore(path, pool, budget, adapters)
    with logs_on_stderr(log_format), ExitStack() as bar:
        raise_limit()
        report = bar.enter_context(console.progress_bar("start"))

        def ready(server: app.ZenServer) -> None:
            bar.close()
            app.settle_memory()
            names = ", ".join(store.names()) or "no variant yet"
            http = "" if server.http is None else f", over HTTP on {server.http.address}"
            console.say(f"ready on {server.address}{http}: base, {names}")

        return asyncio.run(app.serve(store, options, report, ready))


@contextmanager
def logs_on_stderr(log_format: LogFormat = "text") -> Iterator[None]:
    """Shows what the project's own modules log, and seldom what the sender of traces does; how
    others log is left to them."""
    lines = Lines(sys.stderr)
    handler, seldom = Onto(lines), Onto(lines)
    for each in (handler, seldom):
        each.setFormatter(formatter(log_format))
        each.addFilter(WithRequest())
    seldom.addFilter(Seldom())
    own = (logging.INFO, handler)
    others = (logging.ERROR, seldom)
    loggers = {"server": own, "zen_jax": own, "opentelemetry": others, "asyncio": others}
    with closing(lines), ExitStack() as shown:
        for name, (level, where) in loggers.items():
            shown.enter_context(_shown(logging.getLogger(name), level, where))
        yield


@contextmanager
def _shown(logger: logging.Logger, level: int, handler: logging.Handler) -> Iterator[None]:
    before = logger.level, logger.propagate
    logger.setLevel(level)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(handler)
