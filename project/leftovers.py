"""Variables of a launcher that is not there: with them a plain start would wait for ever, or say and write nothing."""

import os
from typing import Any

from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from project.usage import UsageError

STARTED_BY = "PROJECT_STARTED_BY"  # the process that may start others, which inherit its variables rightly
PLACES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
LOCAL = ("127.0.0.1", "localhost", "::1")


def refuse_leftovers(config: Any) -> None:
    """Refuse a start on one machine in which variables promise processes that nobody starts.

    Raises:
        UsageError: Naming the variables and how to unset them.
    """
    started = os.environ.get(STARTED_BY) in (str(os.getpid()), str(os.getppid()))
    os.environ[STARTED_BY] = str(os.getpid())
    if started or config["plugins"] or LSFEnvironment.detect():
        return
    if SLURMEnvironment.detect():
        tasks = int(os.environ.get("SLURM_NTASKS") or 1)
        devices = int(config["devices"]) if str(config["devices"]).isdigit() else 0
        if "SLURM_PROCID" in os.environ and devices * config["num_nodes"] in (0, tasks):
            return
        found = {n: v for n, v in os.environ.items() if n.startswith("SLURM_")}
        why = f"SLURM_NTASKS={tasks} promises {tasks} processes; --devices and --num_nodes, or srun, do not start them"
    elif config["num_nodes"] > 1:  # started by hand on each machine
        return
    else:
        found = {n: os.environ[n] for n in PLACES if n in os.environ and (n, os.environ[n]) != ("NODE_RANK", "0")}
        if str(config["devices"]) != "1" and os.environ.get("MASTER_ADDR", LOCAL[0]) not in LOCAL:
            found["MASTER_ADDR"] = os.environ["MASTER_ADDR"]
        why = f"{', '.join(f'{n}={v}' for n, v in found.items())}: set by a launcher, but none started this process"
    if found:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # whatever these variables say: somebody must speak
        raise UsageError(f"{why}.\nLeft over in this shell? unset {' '.join(sorted(found))}")
