"""Which devices there are, which were asked for, and what to say of them."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from project.usage import UsageError


def why_no_gpu() -> str:
    """The likely reason why torch sees no accelerator."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) is built for the CPU only"
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    if not Path("/proc/driver/nvidia").exists() and sys.platform == "linux":
        return "no NVIDIA driver is loaded"
    return f"torch {torch.__version__} finds no usable device"


def is_rank_zero() -> bool:
    """Whether this process speaks and writes for the job; known before the processes have met."""
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank == 0


def device_words(accelerator: str, trainer: Any) -> str:
    """The devices in use by name, or why there is no GPU."""
    device = trainer.strategy.root_device
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        ids = getattr(trainer, "device_ids", [])
        return f"{count}{torch.cuda.get_device_name(device)} (cuda {', '.join(map(str, ids))})"
    if device.type != "cpu":
        return f"{count}{device.type}"
    processes = f"{trainer.world_size} processes, " if trainer.world_size > 1 else ""
    why = "as asked" if accelerator == "cpu" else f"no GPU: {why_no_gpu()}"
    return f"CPU ({processes}{torch.get_num_threads()} threads; {why})"


def check_devices(config: dict[str, Any]) -> None:
    """Refuse an accelerator that is not there, or a ``devices`` value that means nothing on it.

    Raises:
        UsageError: With what was asked, what was found, and what works here.
    """
    accelerator, devices = config["accelerator"], config["devices"]
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    missing = {"gpu": not (cuda or mps), "cuda": not cuda, "mps": not mps}.get(accelerator, False)
    if missing:
        count = devices if str(devices).isdigit() and str(devices) != "0" else 1
        raise UsageError(
            f"--accelerator {accelerator} --devices {devices}: no such device here: {why_no_gpu()}.\n"
            f"What works here: --accelerator cpu --devices {count}"
        )
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not (cuda or mps))
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = config["devices"] = int(devices)
    fine = devices == "auto" or (type(devices) is int and devices > 0)
    if on_cpu and not fine:
        raise UsageError(f"--devices {devices}: on the CPU, give the number of processes (1 or more), or auto.")
    if cuda and not on_cpu:  # pragma: cuda
        found = torch.cuda.device_count()
        listed = [int(d) for d in devices] if isinstance(devices, list) else _numbers(str(devices))
        within = max(listed) < found if listed else devices in ("auto", -1) or (fine and int(devices) <= found)
        if not within:
            raise UsageError(
                f"--devices {devices}: {found} GPUs were found, 0 to {found - 1}. Give a number of GPUs (-1 or auto: all), "
                "or their numbers as a list: 0,1 or [0]."
            )


def _numbers(devices: str) -> list[int]:
    """The device numbers of a comma-separated list; none for a plain count."""
    parts = [d.strip() for d in devices.split(",") if d.strip()]
    return [int(d) for d in parts] if "," in devices and all(d.isdigit() for d in parts) else []


def follow_launcher(config: dict[str, Any], typed: bool) -> None:
    """Under torchrun the launcher has decided how many processes there are: follow it, or refuse a contradiction."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if not typed:
        config["devices"] = local
    elif config["devices"] != local and config["devices"] != "auto":
        raise UsageError(
            f"--devices {config['devices']}, but torchrun started {local} processes here. Leave --devices out."
        )
    config["num_nodes"] = world // local
