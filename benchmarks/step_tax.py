"""What a training step of a small model costs, as a multiple of a bare PyTorch loop.

    python benchmarks/step_tax.py [--rounds 9] [--steps 800] [--write]

LinearModel(10, 1), 64 rows a step, SGD, one thread, one process unless said. Every round measures all loops one after
the other, forwards and backwards in turn, and the bare loop before and after each of them. Medians of the ratios are
printed, in processor time, which other programs on the machine disturb least; a µs is one of the bare loop's fastest
tenth. The last lines are ``name: ratio``. ``--write`` puts it all in docs/performance.md.
"""

import argparse
import datetime
import gc
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch

from benchmarks import anatomy
from benchmarks.loops import Task, loops, settle, two_processes

COMPARED = ("bare loop, DataLoader(TensorDataset)", "Hydra template style", "Lightning, stock full-featured")
PAGE = """# Performance

Written by `python benchmarks/step_tax.py --write` on
{machine}.
Each number is a median of paired rounds, in processor time; ratios are to a bare PyTorch loop on views, measured
before and after each loop.

## A training step of a small model

LinearModel(10, 1), 64 rows, SGD, one thread. *Ours* is `python train.py` with everything on: progress, TensorBoard,
CSV, loss and R², checkpoints, throughput, memory, the checks of every step, exact resume. The loops of Lightning run
at a terminal too, and are compared with ours there; *full-featured* is a Rich bar, TensorBoard, CSV, checkpoints, the
throughput monitor; the Hydra style logs a mean loss and a metric at every step, from rows put together one by one.

{loops}

```text
{last}
```

## What the step is made of

One thing left out at a time, in one run of the command (`benchmarks/anatomy.py`).

{parts}

Where it stops: most of the rest is Lightning's own loop, some forty calls with a name to format, a profiler to ask and
a hook to look up in each. The checks of every step come next: a gradient that is not finite must be known before the
update, and Python's and NumPy's generators are seeded with torch's so that a resume is exact; both together are about
0.2 x. A larger model does not feel any of it: the sum is fixed, whatever the step computes.
"""


def measure(rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """For each loop and round: µs a step, and that of the bare loop just before and after it."""
    task, found = Task(steps), {}  # type: ignore[var-annotated]
    for i in range(rounds + 1):
        order = list(loops(task).items())
        before = task.bare()
        for name, loop in order if i % 2 == 0 else reversed(order):
            gc.collect()
            micro, after = loop(), task.bare()
            if i:  # the first round warms up
                found.setdefault(name, []).append((micro, (before + after) / 2))
            before = after
        print(f"round {i} of {rounds}", file=sys.stderr, flush=True)
    return {name: found[name] for name in loops(task)}


def ratio(found: dict[str, list[tuple[float, float]]], name: str, to: str = "") -> float:
    """Median over the rounds of a loop's time to another's, each as a multiple of the bare loop run next to it."""
    if not to:
        return statistics.median(micro / bare for micro, bare in found[name])
    pairs = zip(found[name], found[to], strict=True)
    return statistics.median((a / bare_a) / (b / bare_b) for (a, bare_a), (b, bare_b) in pairs)


def run() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--steps", type=int, default=800)
    options.add_argument("--write", action="store_true", help="Write docs/performance.md.")
    asked = options.parse_args()
    settle()
    found = measure(asked.rounds, asked.steps)
    bare = statistics.quantiles([b for pairs in found.values() for _, b in pairs], n=10)[0]
    lines = ["| loop | x bare | µs a step |", "| --- | --- | --- |"]
    for name in found:
        times = ratio(found, name)
        lines.append(f"| {name} | {times:.2f} | {times * bare:.0f} |")
    both = two_processes(2 * asked.steps)
    lines += [f"| ours, two processes over gloo, each | {both:.2f} | {both * bare:.0f} |"]
    parts = anatomy.table(40)
    last = [
        f"ours to the bare loop: {ratio(found, 'ours'):.2f}",
        f"ours at a terminal to the bare loop: {ratio(found, 'ours, at a terminal'):.2f}",
        *(f"{name} to ours: {ratio(found, name, 'ours, at a terminal'):.2f}" for name in COMPARED),
    ]
    print("\n".join([*lines, "", *parts, "", *last]))
    if asked.write:
        write("\n".join(lines), "\n".join(parts), "\n".join(last))


def write(loops: str, parts: str, last: str) -> None:
    page = Path(__file__).parent.parent / "docs" / "performance.md"
    cpu = next(
        (x.partition(": ")[2] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "CPU"
    )
    machine = f"{os.cpu_count()} cores of an {cpu.strip()}, torch {torch.__version__}, lightning {L.__version__}, "
    text = PAGE.format(machine=machine + f"{datetime.date.today()}", loops=loops, parts=parts, last=last)
    page.write_text(text)


if __name__ == "__main__":
    run()
