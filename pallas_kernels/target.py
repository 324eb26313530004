"""What is traced is for: this process's own devices, or those of a mesh that is compiled for."""

import jax


def platform() -> str:
    """The platform of the computation that is being traced: "cpu" or "gpu".

    Inside `jax.shard_map`, and under `jax.sharding.use_abstract_mesh`, it is that of the mesh's
    devices, which need not be here: programs for Hopper are compiled on machines without one.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
