"""What a training step of a small model costs, as a multiple of a bare PyTorch loop.

    python benchmarks/step_tax.py [--rounds 9] [--steps 800] [--rotations 40]

LinearModel(10, 1), 64 rows a step, SGD, one thread, one process unless said. Every round measures all loops one after
the other, forwards and backwards in turn, and the bare loop before and after each of them. Medians of the ratios are
printed, in processor time, which other programs on the machine disturb least; a µs is one of the bare loop's fastest
tenth. The last lines are ``name: ratio``. `benchmarks/all.py` puts it all in docs/performance.md.
"""

import argparse
import gc
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import anatomy
from benchmarks.loops import Task, loops, settle, two_processes

COMPARED = ("bare loop, DataLoader(TensorDataset)", "Hydra template style", "Lightning, stock full-featured")


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
    options.add_argument("--rotations", type=int, default=40, help="of the anatomy")
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
    parts = anatomy.table(asked.rotations)
    last = [
        f"ours to the bare loop: {ratio(found, 'ours'):.2f}",
        f"ours at a terminal to the bare loop: {ratio(found, 'ours, at a terminal'):.2f}",
        *(f"{name} to ours: {ratio(found, name, 'ours, at a terminal'):.2f}" for name in COMPARED),
    ]
    print("\n".join([*lines, "", *parts, "", *last]))


if __name__ == "__main__":
    run()
