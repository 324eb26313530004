"""`zen serve`: a store is served until a signal comes."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from server import app, console
from server.call_log import LogFormat, WithRequest, formatter
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
    """Shows what the project's own modules log; how others log is left to them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    handler.addFilter(WithRequest())
    loggers = [logging.getLogger(name) for name in ("server", "zen_jax")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
            logger.propagate = propagate
