"""H100s that exist for the compiler only.

JAX_PLATFORMS=cpu has to be set before jax is imported: the CUDA plugin then registers for
compilation and opens no device. It needs the dependency group `aot`.
"""

import math

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What the compiler asks of a device: an H100 SXM5 with 80 GB, 132 multiprocessors, CUDA 12.8.
_DEVICE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_core": 228 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": (1 << 31) - 1,
    "block_dim_limit_y": (1 << 16) - 1,
    "block_dim_limit_z": (1 << 16) - 1,
    "memory_bandwidth": 3352320000000,
    "l2_cache_size": 50 << 20,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84929347584,
    "registers_per_core_limit": 64 << 10,
    "registers_per_block_limit": 64 << 10,
}


def _target() -> str:
    device = "\n".join(f"  {name}: {value}" for name, value in _DEVICE.items())
    return (
        f"gpu_device_info {{\n{device}\n  cuda_compute_capability {{ major: 9 minor: 0 }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        "runtime_version { major: 12 minor: 8 patch: 0 }\n"
        'device_description_str: "NVIDIA H100 80GB HBM3"\n'
    )


def mesh(**axes: int) -> Mesh:
    """A mesh of H100s of one host, such as mesh(model=8)."""
    count = math.prod(axes.values())
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target(), topology=f"1x1x{count}"
    )
    return topologies.make_mesh(topology, tuple(axes.values()), tuple(axes))


def argument(
    on: Mesh, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *axes: str | None
) -> jax.ShapeDtypeStruct:
    """An argument to lower with, sharded over `on`, that allocates nothing."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, PartitionSpec(*axes)))
