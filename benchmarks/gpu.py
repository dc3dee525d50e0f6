"""On a GPU: creation on the device, copies hidden behind compute, the share of the chip in use, against the CPU.

    python benchmarks/gpu.py [--device cuda]

* rows made by the source on the device, and made on the CPU and copied: rows a second;
* a stream of chunks whose copies run beside the compute: its time over that of the compute alone;
* `python train.py` with a wide MLP in bf16-mixed: its time a step over that of a bare loop, and model FLOPs
  utilisation (6 x weights x rows a step) of the rate that one matrix product of the same type reaches here;
* a matrix product of float32 on the CPU and on the device.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch
from torch import nn

from benchmarks.ddp_loop import MLP
from benchmarks.loops import quiet, settle
from project.cli import main
from project.data.order import Part, RowOrder
from project.data.sources import SyntheticSource
from project.data.stream import Chunks, Shares, Stream

WARM = 10
WIDTH, ROWS, STEPS = 8192, 8192, 60
FLAGS = ["--max_epochs", "1", "--precision", "bf16-mixed", "--model.net", "benchmarks.ddp_loop.MLP"]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """The fastest of some times; the first warms up."""
    found = []
    for _ in range(times + 1):
        wait(device)
        begun = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])


class Clock(L.Callback):
    """Seconds a step, from step 10 on; the device is waited for at both ends only."""

    seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: object, outputs: object, batch: object, i: int) -> None:
        if i + 1 in (WARM, trainer.num_training_batches):
            wait(trainer.strategy.root_device)
            if i + 1 == WARM:
                self.begun = time.perf_counter()
            else:
                Clock.seconds = (time.perf_counter() - self.begun) / (i + 1 - WARM)


def creation(device: torch.device, rows: int) -> list[str]:
    source, numbers = SyntheticSource(rows), torch.arange(rows)
    there = rows / seconds(lambda: source.read(numbers.to(device)), device)
    here = rows / seconds(lambda: [t.to(device) for t in source.read(numbers)], device)
    return [
        f"| rows made on the device | {there:,.0f} rows/s |",
        f"| rows made on the CPU, copied | {here:,.0f} rows/s |",
    ]


class Stored(SyntheticSource):
    """Rows of a table in memory: nothing but the copy takes time."""

    on_device = False

    def __init__(self, rows: int, features: int) -> None:
        super().__init__(rows, features)
        self.x = torch.randn(rows, features)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = int(rows[0])
        return (self.x[first : first + len(rows)],)


def hidden(device: torch.device, rows: int, width: int) -> list[str]:
    source, batch = Stored(rows, width), 1024
    chunks = Chunks(source, Part(rows, 0.0, 1.0), RowOrder(rows, 0, False, None), Shares(rows, 0, batch), False)
    weight = torch.randn(width, width, device=device)
    fixed = torch.randn(batch, width, device=device)

    def work(batches: Any) -> None:
        for x in batches:
            for _ in range(20):
                x = x @ weight * 1e-3

    compute = seconds(lambda: work(fixed for _ in range(rows // batch)), device)
    stream = lambda: (x for (x,) in Stream(chunks, device, 8 * batch, 0, lambda: (0, 0)))  # noqa: E731
    both, copies = seconds(lambda: work(stream()), device), seconds(lambda: [*stream()][-1], device)
    return [f"| stream and compute, to compute alone (copies alone: {copies / compute:.2f}) | {both / compute:.2f} |"]


def utilisation(device: torch.device, width: int, rows: int, steps: int) -> tuple[list[str], str]:
    x, y = torch.randn(rows, 10, device=device), torch.randn(rows, 1, device=device)
    model, loss_of = MLP(10, width).to(device), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            pred = model(x)
        optimizer.zero_grad()
        loss_of(pred.float(), y).backward()
        optimizer.step()

    bare = seconds(lambda: [step() for _ in range(steps)], device, 3) / steps
    flags = ["--accelerator", "gpu" if device.type == "cuda" else "cpu", *FLAGS, "--model.net.width", str(width)]
    flags += ["--data.source.rows", str(rows * (steps + WARM)), "--data.batch_size", str(rows)]
    flags += ["--data.split", "[1.0, 0.0, 0.0]", "--callbacks+=benchmarks.gpu.Clock"]
    with tempfile.TemporaryDirectory() as folder, quiet():
        main([*flags, "--run_dir", f"{folder}/run"])
    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    peak = 2 * width**3 / seconds(lambda: a @ a, device, 10)
    flops = 6 * rows * sum(p.numel() for p in model.parameters())
    lines = [f"| {n}, MFU | {flops / t / peak:.0%} |" for n, t in (("bare loop", bare), ("ours", Clock.seconds))]
    return lines, f"step of ours on the GPU, to a bare loop: {Clock.seconds / bare:.2f}"


def product(device: torch.device, n: int) -> list[str]:
    here, there = torch.randn(n, n), torch.randn(n, n, device=device)
    times = [seconds(lambda t=t: t @ t, t.device) for t in (here, there)]  # type: ignore[misc]
    return [f"| matrix product of {n} x {n}: times faster than the CPU | {times[0] / times[1]:.1f} |"]


def table(device: torch.device, scale: int) -> tuple[list[str], list[str]]:
    """(a table in Markdown, lines ``name: ratio``); sizes are divided by ``scale``."""
    lines = ["| on the device | |", "| --- | --- |", *creation(device, 4_000_000 // scale)]
    lines += hidden(device, 131_072 // scale, 2048 // min(scale, 16))
    shares, last = utilisation(device, WIDTH // scale, ROWS // scale, STEPS // min(scale, 4))
    return [*lines, *shares, *product(device, 4096 // min(scale, 16))], [last]


if __name__ == "__main__":
    import benchmarks.gpu as itself  # by the name under which the command finds the clock

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--scale", type=int, default=1, help="divides the sizes, to try the script elsewhere")
    asked = options.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here: not measured.")
        sys.exit()
    settle()
    lines, last = itself.table(torch.device(asked.device), asked.scale)
    print("\n".join([*lines, "", *last]))
