"""How much memory there is, and what does not fit into it."""

import os

import jax

from server.serve_options import ServeOptions


def check_memory(options: ServeOptions, slot_bytes: int) -> None:
    """Sees at once what would fail after minutes, or at the first request.

    Raises:
        ValueError: more memory is to be used than there is, or too little to load a variant.
    """
    most = _device_bytes()
    if options.kv_bytes is not None and options.kv_bytes > most:
        raise ValueError(
            f"kv_bytes is {options.kv_bytes}; the devices have {most} bytes of memory in all"
        )
    if options.host_bytes is not None and options.host_bytes < slot_bytes:
        raise ValueError(
            f"host_bytes is {options.host_bytes}; expected no less than the {slot_bytes} that a "
            "variant takes in the bank, and most take three times as much while they are loaded"
        )


def _device_bytes() -> int:
    """Of memory on all devices; on a CPU, this machine's."""
    if jax.default_backend() == "cpu":
        return memory_bytes()
    return sum((device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.devices())


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
