"""`zen serve`: a store is served until a signal comes."""

import asyncio
import logging
import sys
from pathlib import Path

from server import app, console
from zen_jax.checkpoint.store import Store


def run(path: Path, options: app.ServeOptions) -> bool:
    """Serves; returns whether every request that was taken finished."""
    log_to_stderr()
    store = Store(path)
    with console.progress_bar("start") as report:

        def ready(server: app.ZenServer) -> None:
            report("ready", 1, 1)
            names = ", ".join(store.names()) or "no variant yet"
            console.say(f"ready on {server.address}: base, {names}")

        return asyncio.run(app.serve(store, options, report, ready))


def log_to_stderr() -> None:
    """Shows what the server's own modules log, and other libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for name in ("server", "zen_jax"):
        logging.getLogger(name).setLevel(logging.INFO)
