"""Which devices there are, which were asked for, and what to say of them."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only

from project.data.datamodule import StreamDataModule
from project.engine.sharding import Sharded
from project.leftovers import refuse_leftovers
from project.module import Module
from project.usage import UsageError

MODEL_PARALLEL = "model_parallel"
STORE = "TORCHELASTIC_USE_AGENT_STORE"


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
    device, precision = trainer.strategy.root_device, f"; precision {trainer.precision}"
    count = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        ids = getattr(trainer, "device_ids", [])
        return f"{count}{torch.cuda.get_device_name(device)} (cuda {', '.join(map(str, ids))}){precision}"
    if device.type != "cpu":
        return f"{count}{device.type}{precision}"
    processes = f"{trainer.world_size} processes, " if trainer.world_size > 1 else ""
    why = "as asked" if torch.cuda.is_available() else f"no GPU: {why_no_gpu()}"
    return f"CPU ({processes}{torch.get_num_threads()} threads; {why}){precision}"


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
    accelerator, devices = config["accelerator"], config["devices"]
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


def check_strategy(config: Any) -> None:
    """Refuse strategies, precisions and the like that this machine or the command cannot do, before data is read.

    Raises:
        UsageError: With the reason, and what works.
    """
    gpus, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    on_cpu = config["accelerator"] == "cpu" or (config["accelerator"] == "auto" and not (gpus or mps))
    _check_name(config, on_cpu)
    _check_precision(config, on_cpu, on_mps=not on_cpu and mps and not gpus)
    if config["sync_batchnorm"] and on_cpu and (config["num_nodes"] > 1 or _count(config["devices"]) > 1):
        raise UsageError("--sync_batchnorm true: torch's SyncBatchNorm runs on GPUs only. On the CPU, leave it out.")


def _check_name(config: Any, on_cpu: bool) -> None:
    """Refuse a strategy that would fail after data was read, or that hands nothing back to the command."""
    name = str(getattr(config["strategy"], "class_path", config["strategy"]))
    known = ("auto", MODEL_PARALLEL, *StrategyRegistry.available_strategies())
    if started := re.search(r"_(spawn|fork|notebook)", name):
        wrong = f"it is for Python and notebooks: its {started[1]} processes hand the command nothing back but weights"
    elif "fsdp" in name.lower() and on_cpu:
        wrong = "torch's FSDP runs on GPUs only; model_parallel (FSDP2) also shards on the CPU"
    elif "deepspeed" in name.lower() and not find_spec("deepspeed"):
        wrong = "it needs the package deepspeed (pip install deepspeed) and GPUs"
    elif re.search(r"xla|tpu", name.lower()) and not find_spec("torch_xla"):
        wrong = "it needs the package torch_xla and a TPU"
    elif name == "dp":
        wrong = "DataParallel is gone from Lightning; ddp gives each device a process of its own, and is faster"
    elif isinstance(config["strategy"], str) and name not in known:
        wrong = (
            "invalid strategy name. Expected auto, ddp, model_parallel, fsdp, deepspeed, xla (a class: by class_path)"
        )
    else:
        return
    raise UsageError(f"--strategy {name}: {wrong}.\nWhat works here: --strategy ddp")


def _check_precision(config: Any, on_cpu: bool, on_mps: bool) -> None:
    """Refuse what the device cannot do, where Lightning would take another in silence; spell it out in the config."""
    here = ["32-true", "bf16-mixed", "bf16-true"]
    if "model_parallel" not in str(config["strategy"]).lower() and not on_mps:  # Apple's GPUs have no float64
        here.append("64-true")
    if not on_cpu:
        here += ["16-mixed", "16-true"]
    if not on_cpu and find_spec("transformer_engine"):
        here += ["transformer-engine", "transformer-engine-float16"]
    asked = str(config["precision"])
    meant = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}.get(asked, asked)
    if meant not in here:
        raise UsageError(f"--precision {asked}: not supported here. Expected one of {', '.join(here)}.")
    config["precision"] = None if config["plugins"] and meant == "32-true" else meant  # a plugin may bring its own


def strategy(config: Any, model: Any, data: Any) -> Any:
    """The strategy for the Trainer: a name that Lightning knows, or an object.

    Raises:
        UsageError: If the net cannot be sharded, or the data is read in another way than the strategy needs.
    """
    chosen = config["strategy"]
    if chosen == MODEL_PARALLEL:
        devices = config["devices"]
        local = len(_numbers(devices)) or (_count(devices) if _count(devices) > 0 else torch.cuda.device_count()) or 1
        chosen = Sharded(local * config["num_nodes"])
    if not isinstance(chosen, ModelParallelStrategy):
        return chosen
    if isinstance(model, Module) and not callable(getattr(model.net, "shard", None)):
        raise UsageError(
            f"--strategy {MODEL_PARALLEL}: {type(model.net).__name__} has no method shard(mesh) to say how it is "
            "sharded;\nproject/models/deep.py shows one. What works without: --strategy ddp"
        )
    if not isinstance(chosen, Sharded) and isinstance(data, StreamDataModule):
        raise UsageError(
            "--strategy ModelParallelStrategy: its processes may need the same rows, but the StreamDataModule gives "
            f"each its own.\nWhat works: --strategy {MODEL_PARALLEL}, or data of your own with --data"
        )
    return chosen


def plugins(given: Any) -> Any:
    """Under ``srun``, also Lightning's SLURM environment, without its requeueing: that is the job script's part."""
    chosen = list(given) if isinstance(given, list) else [given] if given else []
    elsewhere = "TORCHELASTIC_RUN_ID" in os.environ or any(isinstance(p, ClusterEnvironment) for p in chosen)
    if elsewhere or not SLURMEnvironment.detect():
        return given
    try:
        return [*chosen, SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as e:  # variables of SLURM that contradict each other
        raise UsageError(str(e)) from None


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
        refuse_leftovers(config)
        return
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if typed and str(config["devices"]) not in (str(local), "auto"):
        raise UsageError(
            f"--devices {_spelt(config['devices'])}, but torchrun started {local} processes here. Leave --devices out."
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ.get(STORE) == "True":
        # torch 2.13 keeps one store for all attempts: restarted processes find the addresses of the dead, and hang
        raise UsageError(
            "torchrun --max_restarts: restarted processes may wait for dead ones for ever. Start it as\n"
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv_backend c10d ... (or --standalone, on one machine)."
        )
    config["devices"], config["num_nodes"] = local, world // local
