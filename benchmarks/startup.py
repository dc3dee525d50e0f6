"""How long the command takes to its first step, to its help and to an error, beside what it stands on.

    python benchmarks/startup.py [--rounds 5]

Each is a process of its own; all take their turn in every round. Processor time, which other programs on the machine
disturb least; medians of the ratios within a round. The raw script is the least that torch can do: a linear layer, one
step of SGD; torch itself imports torch._dynamo for it.
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

RAW = """
import time, torch
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.nn.functional.mse_loss(model(torch.randn(64, 10)), torch.randn(64, 1)).backward()
optimizer.step()
print("seconds", time.process_time())
"""
STEP = ["train.py", "--accelerator", "cpu", "--callbacks+=benchmarks.startup.First", "--run_dir"]
PROCESSES = {
    "raw torch script, one step": ["-c", RAW],
    "ours, to the first step": STEP,
    "import of Lightning's CLI": ["-c", "import lightning.pytorch.cli"],
    "ours, --help": ["train.py", "--help"],
    "ours, a mistyped flag": ["train.py", "--learning_rate", "0.1"],
}
BASES = {
    "ours, to the first step": "raw torch script, one step",
    "ours, --help": "import of Lightning's CLI",
    "ours, a mistyped flag": "import of Lightning's CLI",
}


class First(L.Callback):
    """Says when the first step is done, and ends the process: it was all that was asked."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        print("seconds", time.process_time(), flush=True)
        os._exit(0)


def seconds(arguments: list[str]) -> float:
    """Processor time of a process: what it says itself, or all of it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*arguments, f"{folder}/run"] if arguments[-1] == "--run_dir" else arguments
        child = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=-1, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdout is not None
        words = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        child.stdout.close()
    said = [line.split()[1] for line in words.splitlines() if line.startswith("seconds")]
    if child.returncode not in (0, 2):
        raise RuntimeError(f"{arguments}: exit code {child.returncode}")
    return float(said[0]) if said else used.ru_utime + used.ru_stime


def table(rounds: int) -> tuple[list[str], list[str]]:
    """(a table in Markdown, lines ``name: ratio``)."""
    found: dict[str, list[float]] = {name: [] for name in PROCESSES}
    for i in range(rounds + 1):
        for name, arguments in PROCESSES.items():
            took = seconds(arguments)
            if i:  # the first round brings the files into memory
                found[name].append(took)
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))
        for name, base in BASES.items()
    }
    lines = ["| process | s | ratio |", "| --- | --- | --- |"]
    for name, took in found.items():
        lines.append(f"| {name} | {min(took):.2f} | {f'{ratios[name]:.2f}' if name in ratios else '1.00'} |")
    return lines, [f"{name}, to {BASES[name]}: {value:.2f}" for name, value in ratios.items()]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    lines, last = table(options.parse_args().rounds)
    print("\n".join([*lines, "", *last]))
