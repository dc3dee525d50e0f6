"""Two processes: rows a second of the command beside those of torch's own DistributedDataParallel loop.

    python benchmarks/scaling.py [--rounds 3]

One thread a process, gloo, 64 rows a process and step, in turn within every round. Time by the clock, since
processes wait for each other; it is counted from step 50 on. The loop of torch (`benchmarks/ddp_loop.py`) has its rows
in memory, as views; ours is `python train.py --devices 2` with everything on. Medians of the ratios within a round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L

ROOT = Path(__file__).parent.parent
ROWS, WARM = 64, 50  # as in ddp_loop.py
NETS = {"LinearModel": 1500, "MLP": 500}  # and steps
WORDS = {"LinearModel": "LinearModel(10, 1)", "MLP": "MLP, 10 to 512, 512, 512, 1"}


class Speed(L.Callback):
    """Rows a second of training from step 50 on, over all processes."""

    def on_train_batch_end(self, trainer: L.Trainer, module: object, outputs: object, batch: object, i: int) -> None:
        if i + 1 == WARM:
            self.begun = time.perf_counter()
        if i + 1 == trainer.num_training_batches and trainer.is_global_zero:
            rows = (i + 1 - WARM) * ROWS * trainer.world_size
            print("rows_per_s", rows / (time.perf_counter() - self.begun), flush=True)


def speed(commands: list[list[str]]) -> float:
    """What the first of the commands, which are run together, says."""
    run = [
        subprocess.Popen([sys.executable, *c], cwd=ROOT, stdout=-1, stderr=subprocess.DEVNULL, text=True)
        for c in commands
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in run]
    finally:
        for process in run:
            process.kill()
    codes = [process.returncode for process in run]
    if any(codes) or "rows_per_s " not in said[0]:
        raise RuntimeError(f"{' '.join(commands[0])}: exit codes {codes}")
    return float(said[0].partition("rows_per_s ")[2].split()[0])


def torch_loop(net: str, folder: str) -> float:
    arguments = [str(NETS[net]), net, f"{folder}/store"]
    return speed([["benchmarks/ddp_loop.py", str(rank), *arguments] for rank in range(2)])


def ours(net: str, folder: str) -> float:
    command = ["train.py", "--accelerator", "cpu", "--devices", "2", "--max_epochs", "1", "--run_dir", f"{folder}/run"]
    command += ["--data.source.rows", str(NETS[net] * ROWS * 2), "--data.split", "[1.0, 0.0, 0.0]"]
    command += ["--callbacks+=benchmarks.scaling.Speed"]
    return speed([command if net == "LinearModel" else [*command, "--model.net", "benchmarks.ddp_loop.MLP"]])


def table(rounds: int) -> tuple[list[str], list[str]]:
    """(a table in Markdown, lines ``name: ratio``)."""
    lines = ["| two processes | torch's DDP loop, rows/s | ours, rows/s | ratio |", "| --- | --- | --- | --- |"]
    last = []
    for net in NETS:
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append((torch_loop(net, folder), ours(net, folder)))
        ratio = statistics.median(b / a for a, b in found)
        fastest = [max(side) for side in zip(*found, strict=True)]
        lines.append(f"| {WORDS[net]} | {fastest[0]:,.0f} | {fastest[1]:,.0f} | {ratio:.2f} |")
        last.append(f"ours to torch's DDP loop, rows/s of two processes, {net}: {ratio:.2f}")
    return lines, last


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    lines, last = table(options.parse_args().rounds)
    print("\n".join([*lines, "", *last]))
