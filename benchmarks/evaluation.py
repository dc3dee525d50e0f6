"""What validation and prediction cost a row, as a multiple of a bare loop under inference_mode with 64 rows a batch.

    python benchmarks/evaluation.py [--rounds 5] [--rows 409600]

LinearModel(10, 1), one thread; the rows lie in .npy files, those of the bare loop in memory, as views. Validation gives
the mean loss and R²; predictions are written to a file. Every round runs the command for each, the bare loop before and
after it. Processor time, medians of the ratios.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import numpy as np
import torch
from torch import nn

from benchmarks.loops import COLUMNS, ROWS, quiet, settle
from project.cli import main
from project.models import LinearModel

SMALL = ["--data.eval_batch_size", str(ROWS)]
CASES: dict[str, tuple[str, list[str]]] = {
    "validate": ("validate", []),
    "validate, batches of 64 rows": ("validate", SMALL),
    "predict, to a .npy file": ("predict", ["--output", "predictions.npy"]),
    "predict, to a .npy file, batches of 64 rows": ("predict", ["--output", "predictions.npy", *SMALL]),
    "predict, to a .csv file": ("predict", []),
}


class Clock(L.Callback):
    """Processor time of one pass over the rows, from its start to its scores or its complete file."""

    seconds = 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun = time.process_time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Clock.seconds = time.process_time() - self.begun

    on_predict_start = on_validation_start

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "predict":
            self.on_validation_end(trainer, pl_module)


def bare(x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean loss over all rows, in batches of 64."""
    model, loss_of, total = LinearModel(COLUMNS, 1).eval(), nn.MSELoss(), torch.zeros((), dtype=torch.float64)
    begun = time.process_time()
    with torch.inference_mode():
        for rows, targets in zip(x.split(ROWS), y.split(ROWS), strict=True):
            total += loss_of(model(rows), targets) * len(rows)
    return time.process_time() - begun


def measure(rounds: int, rows: int) -> dict[str, list[tuple[float, float]]]:
    """For each case and round: seconds, and those of the bare loop run next to it."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    x, y, begun = torch.randn(rows, COLUMNS), torch.randn(rows, 1), ["--accelerator", "cpu", "--run_dir"]
    with tempfile.TemporaryDirectory() as folder, quiet():
        for name, values in (("x", x), ("y", y)):
            np.save(f"{folder}/{name}.npy", values.numpy())
        main([*begun, f"{folder}/trained", "--max_steps", "1", "--limit_val_batches", "0", "--limit_test_batches", "0"])
        for i in range(rounds + 1):
            for name, (command, flags) in CASES.items():
                source = f"--data.{'val' if command == 'validate' else command}_source"
                run = f"{folder}/{i}-{name.replace(' ', '-')}"
                asked: list[Any] = [command, *begun, run, "--ckpt_path", f"{folder}/trained/checkpoints/last.ckpt"]
                asked += [source, "project.data.sources.ArraySource", f"{source}.x", f"{folder}/x.npy"]
                asked += [f"{source}.y", f"{folder}/y.npy", "--callbacks+=benchmarks.evaluation.Clock"]
                asked += [f"{run}/{flag}" if flag.endswith(".npy") else flag for flag in flags]
                gc.collect()
                before = bare(x, y)
                main(asked)
                if i:  # the first round warms up
                    found[name].append((Clock.seconds, (before + bare(x, y)) / 2))
            print(f"evaluation, round {i} of {rounds}", file=sys.__stderr__, flush=True)
    return found


def table(rounds: int, rows: int = 409_600) -> tuple[list[str], list[str]]:
    """(a table in Markdown, lines ``name: ratio``)."""
    found = measure(rounds, rows)
    loop = statistics.quantiles([b for pairs in found.values() for _, b in pairs], n=10)[0] / rows * 1e6
    ratios = {name: statistics.median(a / b for a, b in pairs) for name, pairs in found.items()}
    lines = ["| evaluation | x bare | µs a row |", "| --- | --- | --- |", f"| bare loop, 64 rows | 1.00 | {loop:.3f} |"]
    lines += [f"| {name} | {ratio:.2f} | {ratio * loop:.3f} |" for name, ratio in ratios.items()]
    return lines, [f"{name}, a row, to a bare loop of 64 rows: {ratio:.2f}" for name, ratio in ratios.items()]


if __name__ == "__main__":
    import benchmarks.evaluation as itself  # by the name under which the command finds the clock

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", type=int, default=409_600)
    chosen = options.parse_args()
    settle()
    lines, last = itself.table(chosen.rounds, chosen.rows)
    print("\n".join([*lines, "", *last]))
