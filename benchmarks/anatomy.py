"""What a training step of the command is made of: one thing is changed at a time, for 50 steps in turn.

    python benchmarks/anatomy.py [--rotations 60]

All in one run of the command, so that a change of the machine's speed meets all variants alike. Processor time. For
each variant: the median over the rotations of its difference to the unchanged step, as a multiple of the bare loop
measured with it, in µs of the bare loop's fastest blocks.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from benchmarks.loops import ROWS, Task, quiet, settle
from project.cli import CLI
from project.data.stream import Stream
from project.engine import lean
from project.engine.checkpoint import Checkpoints
from project.engine.lean import LeanModule
from project.engine.nonfinite import NonFinite
from project.engine.oom import OutOfMemory
from project.engine.report import Report
from project.engine.resume import Resume
from project.engine.signals import Signals
from project.module import Module

BLOCK = 50
Undo = Callable[[], None]
Change = Callable[[CLI], Undo]


def swap(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; returns what puts it back."""
    own, old = name in vars(owner), vars(owner).get(name)
    type.__setattr__(owner, name, value) if isinstance(owner, type) else object.__setattr__(owner, name, value)

    def undo() -> None:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)

    return undo


def put(*changes: tuple[Any, str, Any]) -> Change:
    def change(cli: CLI) -> Undo:
        undos = [swap(*each) for each in changes]
        return lambda: [undo() for undo in reversed(undos)] and None

    return change


def _empty_hooks(cli: CLI) -> Undo:
    taken = []
    for owner in (*cli.trainer.callbacks, cli.model):
        names = [n for n in lean._STEP_HOOKS if n in vars(owner) and vars(owner)[n] is None]
        taken.append((owner, {n: vars(owner).pop(n) for n in names}))
    return lambda: [vars(owner).update(hooks) for owner, hooks in taken] and None


def _signature(cli: CLI) -> Undo:
    step: Any = Module.training_step
    stored = step.__signature__
    del step.__signature__
    return lambda: setattr(step, "__signature__", stored)


def _logs(cli: CLI) -> Undo:
    connector: Any = cli.trainer._logger_connector
    return swap(connector, "on_batch_end", type(connector).on_batch_end.__get__(connector))


M, C = L.LightningModule, L.Callback
SAVINGS: dict[str, Change] = {  # without …
    "NoProfiler": lambda cli: swap(cli.trainer, "profiler", PassThroughProfiler()),
    "skip_empty_hooks": _empty_hooks,
    "skip_empty_logs": _logs,
    "__init_subclass__": _signature,
    "__setattr__": put((LeanModule, "__setattr__", torch.nn.Module.__setattr__)),
    "optimizer_zero_grad": put((LeanModule, "optimizer_zero_grad", M.optimizer_zero_grad)),
    "configure_gradient_clipping": put((LeanModule, "configure_gradient_clipping", M.configure_gradient_clipping)),
    "_call_batch_hook": put((LeanModule, "_call_batch_hook", M._call_batch_hook)),
}
REPORT = (Report, "on_train_batch_end", C.on_train_batch_end)
SEEDS = (Resume, "on_train_batch_start", C.on_train_batch_start)
CHECKPOINTS = (Checkpoints, "on_train_batch_end", C.on_train_batch_end)
SIGNALS = (Signals, "on_train_batch_end", C.on_train_batch_end)
FINITE = (
    (NonFinite, "on_before_backward", C.on_before_backward),
    (NonFinite, "on_before_optimizer_step", C.on_before_optimizer_step),
    (NonFinite, "on_train_batch_end", C.on_train_batch_end),
)
MEMORY = (
    (OutOfMemory, "_train", lambda self, step, *args: step(*args)),
    (OutOfMemory, "_backward", lambda self, backward, *args, **kwargs: backward(*args, **kwargs)),
)
WEIGHT = (Module, "backward", M.backward)
STEP = (Module, "training_step", lambda self, batch, batch_idx: self.loss(self.net(batch[0]), batch[1]))
FEATURES: dict[str, Change] = {  # without …
    "report: losses, metrics, speed, memory, progress": put(REPORT),
    "non-finite losses and gradients": put(*FINITE),
    "seeds of each step, for exact resume": put(SEEDS),
    "checkpoints": put(CHECKPOINTS),
    "signals": put(SIGNALS),
    "out of memory: what a retry needs": put(*MEMORY),
    "module: matched shapes, loss in float32, row weights": put(WEIGHT, STEP),
    "all of these": put(REPORT, *FINITE, SEEDS, CHECKPOINTS, SIGNALS, *MEMORY, WEIGHT, STEP),
}


def measure(rotations: int) -> tuple[float, dict[str, float]]:
    """(µs of the bare loop, for "ours" and each variant the µs more than the bare loop or than ours)."""
    changes: dict[str, Change] = {"ours": lambda cli: lambda: None, **SAVINGS, **FEATURES}
    task, names = Task(BLOCK), list(changes)
    times: dict[str, list[float]] = {name: [] for name in ("bare", *names)}
    steps = len(names) * BLOCK * rotations
    real = Stream.__iter__

    def blocks(stream: Stream) -> Iterator[Any]:
        name, began, undo = "", 0.0, lambda: None
        for i, batch in enumerate(real(stream)):
            if i % BLOCK == 0:
                if name:
                    times[name].append((time.process_time() - began) / BLOCK * 1e6)
                undo()
                rotation, place = divmod(i // BLOCK, len(names))
                if place == 0:
                    times["bare"].append(task.bare())
                name = names[place] if rotation % 2 == 0 else names[-1 - place]
                undo = changes[name](cli)
                began = time.process_time()
            yield batch
        undo()

    with tempfile.TemporaryDirectory() as folder, quiet():
        flags = {"run_dir": f"{folder}/run", "max_epochs": 1, "data.source.rows": round(steps * ROWS / 0.8)}
        flags |= {"accelerator": "cpu", "limit_val_batches": 0, "limit_test_batches": 0}
        cli = CLI([word for name, value in flags.items() for word in (f"--{name}", str(value))])
        cli.start()
        gc.collect()
        undo = swap(Stream, "__iter__", blocks)
        cli.fit()
        undo()
    bare = statistics.quantiles(times["bare"], n=10)[0]

    def cost(name: str, base: str) -> float:
        paired = zip(times[name], times[base], times["bare"], strict=False)
        return bare * statistics.median((a - b) / c for a, b, c in list(paired)[2:])

    return bare, {name: cost(name, "bare" if name == "ours" else "ours") for name in names}


def table(rotations: int) -> list[str]:
    """The anatomy in Markdown."""
    bare, cost = measure(rotations)
    floor = cost["ours"] + cost["all of these"]
    lines = ["| a step of ours | µs | x bare |", "| --- | --- | --- |", f"| the bare loop | {bare:.0f} | 1.00 |"]
    rest = {"Lightning's own loop, all savings on": floor, **{n: -cost[n] for n in FEATURES if n != "all of these"}}
    rest["together"] = bare + cost["ours"]
    lines += [f"| {name} | {micro:.0f} | {micro / bare:.2f} |" for name, micro in rest.items()]
    lines += ["", "| saving in `project/engine/lean.py` | µs | x bare |", "| --- | --- | --- |"]
    return lines + [f"| `{name}` | {cost[name]:.0f} | {cost[name] / bare:.2f} |" for name in SAVINGS]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rotations", type=int, default=60)
    settle()
    print("\n".join(table(options.parse_args().rotations)))
