"""How many rows a step had, and how many a second there could be at most."""

from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor


def rows_of(batch: Any) -> int:
    """Rows of a batch whose step returned the bare loss: those of its first tensor; 1 if it has a shape of its own."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return len(first) if isinstance(first, Tensor) and first.ndim else 1


def most_rows_per_s(trainer: L.Trainer, module: L.LightningModule) -> float | None:
    """Rows a second at the full rate of all devices; None if that rate is unknown, or what a row takes.

    A module tells the FLOPs of a training step for one row as ``flops_per_row``; 6 x weights for dense layers.
    """
    flops, device = getattr(module, "flops_per_row", None), trainer.strategy.root_device
    types = {"bf16": torch.bfloat16, "16-": torch.float16}
    dtype = next((t for name, t in types.items() if str(trainer.precision).startswith(name)), torch.float32)
    rate = get_available_flops(device, dtype) if flops and device.type == "cuda" else None
    return rate * trainer.world_size / flops if rate and flops else None
