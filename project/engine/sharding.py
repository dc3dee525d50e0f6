"""A net in shards over all processes: ``--strategy model_parallel``, with torch's ``fully_shard`` (FSDP2)."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_shard(tensor: Tensor) -> Tensor:
    """What this process holds of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Sharded(ModelParallelStrategy):
    """Each process holds a shard of the net and has rows of its own; a checkpoint is one whole file.

    Lightning's defaults are others: the same rows for all processes of a machine, which split single layers, and a
    checkpoint of one file a process. A whole file opens on any number of processes.

    Args:
        processes: Of all machines.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(processes, 1, save_distributed_checkpoint=False)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Also one whose optimizers keep nothing (SGD without momentum), over which Lightning 2.6.6 stumbles."""
        saved = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
        states = saved.get("optimizer_states", [])
        if any(state["state"] for state in states):
            return super().load_checkpoint(checkpoint_path, weights_only)
        optimizers, self.optimizers = self.optimizers, []
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.optimizers = optimizers
        for optimizer, state in zip(optimizers, states, strict=False):
            for group, was in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in was.items() if name != "params"})
        return checkpoint
