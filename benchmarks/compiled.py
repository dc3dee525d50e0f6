"""What ``--model.compile true`` gains a training step on the CPU, for a small net and a larger one.

    python benchmarks/compiled.py [--rounds 3]

The command itself, with and without, in turn; one thread; processor time from step 30 on, when all is compiled.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L

from benchmarks.loops import quiet, settle
from project.cli import main

WARM = 30
NETS = {  # flags, rows a step, steps
    "LinearModel(10, 1), 64 rows": ([], 64, 600),
    "MLP, 10 to 512, 512, 512, 1, 256 rows": (["--model.net", "benchmarks.ddp_loop.MLP"], 256, 100),
}


class Clock(L.Callback):
    """Processor time a step."""

    microseconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: object, outputs: object, batch: object, i: int) -> None:
        if i + 1 == WARM:
            self.begun = time.process_time()
        if i + 1 == trainer.num_training_batches:
            Clock.microseconds = (time.process_time() - self.begun) / (i + 1 - WARM) * 1e6


def ours(flags: list[str], rows: int, steps: int, compiled: bool) -> float:
    with tempfile.TemporaryDirectory() as folder, quiet():
        command = ["--accelerator", "cpu", "--max_epochs", "1", "--run_dir", f"{folder}/run", *flags]
        command += ["--data.source.rows", str(rows * steps), "--data.batch_size", str(rows)]
        command += ["--data.split", "[1.0, 0.0, 0.0]", "--model.compile", str(compiled).lower()]
        main([*command, "--callbacks+=benchmarks.compiled.Clock"])
    gc.collect()
    return Clock.microseconds


def table(rounds: int) -> tuple[list[str], list[str]]:
    """(a table in Markdown, lines ``name: ratio``)."""
    lines, last = ["| net | µs a step | µs compiled | gain |", "| --- | --- | --- | --- |"], []
    for name, (flags, rows, steps) in NETS.items():
        found = [[ours(flags, rows, steps, compiled) for compiled in (False, True)] for _ in range(rounds)]
        plain, compiled = (min(side) for side in zip(*found, strict=True))
        ratio = statistics.median(a / b for a, b in found)
        lines.append(f"| {name} | {plain:.0f} | {compiled:.0f} | {ratio:.2f} |")
        last.append(f"step of {name}, to the same compiled: {ratio:.2f}")
    return lines, last


if __name__ == "__main__":
    import benchmarks.compiled as itself  # by the name under which the command finds the clock

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    settle()
    lines, last = itself.table(asked.rounds)
    print("\n".join([*lines, "", *last]))
