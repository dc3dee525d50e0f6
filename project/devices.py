"""Which devices there are, which were asked for, and what to say of them."""

import os
import re
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


def device_words(trainer: Any) -> str:
    """The devices in use by name, or why there is no GPU."""
    device = trainer.strategy.root_device
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        ids = getattr(trainer, "device_ids", [])
        return f"{count}{torch.cuda.get_device_name(device)} (cuda {', '.join(map(str, ids))})"
    if device.type != "cpu":
        return f"{count}{device.type}"
    processes = f"{trainer.world_size} processes, " if trainer.world_size > 1 else ""
    why = "as asked" if torch.cuda.is_available() else f"no GPU: {why_no_gpu()}"
    return f"CPU ({processes}{torch.get_num_threads()} threads; {why})"


def check_devices(config: Any) -> None:
    """Refuse an accelerator that is not there, or a ``devices`` value that means nothing on it.

    ======================  ==============================  ==================================
    ``--devices``           on the CPU                      on GPUs
    ======================  ==============================  ==================================
    ``1``, ``2``, ``"2"``   that many processes             that many GPUs
    ``auto``                one process                     every GPU
    ``-1``                  refused                         every GPU
    ``0,1``  ``1,``  [0]    refused                         the GPUs of these numbers
    ``0``, more than exist  refused (4 a core at most)      refused
    ======================  ==============================  ==================================

    Raises:
        UsageError: With what was asked, what was found, and what works here.
    """
    accelerator, devices, strategy = config["accelerator"], config["devices"], str(config.get("strategy"))
    if started := re.search(r"spawn|fork|notebook", strategy):
        raise UsageError(
            f"--strategy {strategy}: what its processes have done is lost to the command. "
            f"What works: --strategy {strategy.replace(f'_{started[0]}', '')}"
        )
    gpus, mps = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
    if {"gpu": not (gpus or mps), "cuda": not gpus, "mps": not mps}.get(accelerator, False):
        raise UsageError(
            f"--accelerator {accelerator} --devices {_spelt(devices)}: no such device was found here; "
            f"likely reason: {why_no_gpu()}.\n"
            f"What works here: --accelerator cpu --devices {devices if _count(devices) > 0 else 1}"
        )
    if accelerator == "cpu" or (accelerator == "auto" and not (gpus or mps)):
        most = 4 * (os.cpu_count() or 1)
        if devices != "auto" and not 0 < _count(devices) <= most:
            raise UsageError(
                f"--devices {_spelt(devices)}: on the CPU, expected a number of processes, 1 to {most} here, or auto."
            )
    elif gpus and accelerator in ("gpu", "cuda", "auto"):
        numbers = _numbers(devices)
        right = max(numbers) < gpus if numbers else devices == "auto" or _count(devices) in (-1, *range(1, gpus + 1))
        if not right:
            raise UsageError(
                f"--devices {_spelt(devices)}: found {gpus} GPU{'s' * (gpus > 1)}. Expected how many, 1 to {gpus} "
                f"(-1 or auto: all), or which ones, with a comma: {'0,1' if gpus > 1 else '0,'}"
            )
    if _count(devices):
        config["devices"] = _count(devices)
    if config["num_nodes"] > 1 and not _launched():
        raise UsageError(
            f"--num_nodes {config['num_nodes']}: nothing here tells where the other machines are. "
            "Start the command on each of them with torchrun."
        )


def _count(devices: Any) -> int:
    """A number of devices; 0 for any other form."""
    return int(devices) if re.fullmatch(r"-1|\d+", str(devices).strip()) else 0


def _numbers(devices: Any) -> list[int]:
    """The numbers of single devices ("0,1", "1,", [0]); none for any other form."""
    parts = devices if isinstance(devices, list) else [p for p in str(devices).split(",") if p.strip()]
    listed = isinstance(devices, list) or "," in str(devices)
    return [int(p) for p in parts] if listed and all(str(p).strip().isdigit() for p in parts) else []


def _spelt(devices: Any) -> str:
    return str(devices).replace(" ", "")


def _launched() -> bool:
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR"))


def follow_launcher(config: Any, typed: bool) -> None:
    """Under torchrun the launcher has decided how many processes there are: follow it, or refuse a contradiction."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if typed and str(config["devices"]) not in (str(local), "auto"):
        raise UsageError(
            f"--devices {_spelt(config['devices'])}, but torchrun started {local} processes here. Leave --devices out."
        )
    config["devices"], config["num_nodes"] = local, world // local
