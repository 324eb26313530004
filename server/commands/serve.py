"""`zen serve`: a store is served until a signal comes."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from server import app, console
from server.call_log import LogFormat, Seldom, WithRequest, formatter
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store


def run(path: Path, options: ServeOptions, log_format: LogFormat = "text") -> bool:
    """Serves; returns whether every request that was taken finished."""
    store = Store(path)
    with logs_on_stderr(log_format), ExitStack() as bar:
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
    handler, seldom = (logging.StreamHandler(sys.stderr) for _ in range(2))
    for each in (handler, seldom):
        each.setFormatter(formatter(log_format))
        each.addFilter(WithRequest())
    seldom.addFilter(Seldom())
    own = (logging.INFO, handler)
    loggers = {"server": own, "zen_jax": own, "opentelemetry": (logging.ERROR, seldom)}
    with ExitStack() as shown:
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
