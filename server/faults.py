"""How a fault of the program gets into the log, and under which id its caller hears of it."""

import logging
import traceback
import uuid

import jax

_log = logging.getLogger(__name__)


def log_error(error: Exception) -> str:
    """Log an exception's type and place; its text only when the device gave it. Returns the id."""
    error_id = uuid.uuid4().hex[:12]
    text = str(error) if isinstance(error, jax.errors.JaxRuntimeError) else "text withheld"
    frames = traceback.extract_tb(error.__traceback__)
    places = "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    _log.error(
        "error %s: %s (%s), most recent call last:%s", error_id, type(error).__name__, text, places
    )
    return error_id
