"""What a device of little memory holds: a base, a pool of merged adapters, one conversation."""

from typing import Any

import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.kv_cache import page_bytes
from zen_jax.layout import EMBED, HEAD, tensor_shapes
from zen_jax.merge.lora import Factors
from zen_jax.merge.pool_folder import member_bytes
from zen_jax.plan.memory import weight_bytes

_MOST, _MOST_MEMORY = 1 << 16, 10**15


def pool_plan(
    config: ModelConfig,
    members: int,
    rank: int,
    memory: int,
    context: int,
    base_dtype: str,
    kv_dtype: str,
) -> dict[str, Any]:
    """Bytes of a device that holds everything at once.

    Args:
      config: the model.
      members: of the pool, each an adapter of all seven projections of every layer.
      rank: theirs.
      memory: of the device.
      context: tokens of one conversation.
      base_dtype: one of `zen_jax.plan.memory.BASE_DTYPES`.
      kv_dtype: of keys and values.

    Raises:
      ValueError: a number is below 1 or beyond any device, or the model has no such context.
    """
    given = {"--pool": members, "--rank": rank, "the memory": memory, "--context": context}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    if max(members, rank) > _MOST or memory > _MOST_MEMORY:
        raise ValueError(
            f"--pool is {members}, --rank {rank} and the memory {memory:,} bytes; expected at most "
            f"{_MOST:,}, as much, and {_MOST_MEMORY:,}"
        )
    if context > config.max_position:
        raise ValueError(f"--context is {context}; the model has {config.max_position} positions")
    zero = np.float32(0)
    adapter = {  # shapes only: nothing of this size is held
        name: Factors(
            np.broadcast_to(zero, (rank, shape[1])), np.broadcast_to(zero, (shape[0], rank))
        )
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and name not in (EMBED, HEAD)
    }
    member = member_bytes(adapter, rank)
    base, kv = weight_bytes(config, base_dtype), page_bytes(config, context, kv_dtype)
    left = memory - base - kv
    return {
        "memory": memory,
        "base": base,
        "kv": kv,
        "member": member,
        "members": members,
        "pool": members * member,
        "left": left - members * member,
        "most_members": max(0, left // member),
        "assumptions": [
            "the base is in the memory too, and one conversation; nothing is kept for the system",
            f"a member has rank {rank} in all seven projections of every layer, in float32, as "
            "`zen pool` writes it",
            "one member may answer for several profiles; here each has its own",
            *(
                []
                if base_dtype == "bfloat16"
                else [f"a base in {base_dtype} is arithmetic only: the engine holds bfloat16"]
            ),
        ],
    }
