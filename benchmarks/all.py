"""Runs every benchmark of speed and writes docs/performance.md; about ten minutes on a machine that does nothing else.

    python benchmarks/all.py [--quick]

Each part is a script of its own, which says how it measures; one that fails or takes too long is named on the page and
spoils no other. ``--quick`` only shows that all of them run: it writes to the screen.
"""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch

ROOT = Path(__file__).parent.parent
PARTS = {  # arguments, and for --quick
    "step_tax": (["--rounds", "9"], ["--rounds", "1", "--steps", "60", "--rotations", "4"]),
    "evaluation": (["--rounds", "3"], ["--rounds", "1", "--rows", "20480"]),
    "scaling": (["--rounds", "3"], ["--rounds", "1"]),
    "startup": (["--rounds", "3"], ["--rounds", "1"]),
    "compiled": (["--rounds", "2"], ["--rounds", "1"]),
    "gpu": ([], []),
}
LIMIT = 480  # seconds for a part
PAGE = """# Performance

Written by `python benchmarks/all.py` on
{machine}.
Each table is printed by a script of its own, which tells how it measures. Medians of paired rounds; in processor time,
which other programs disturb least, unless said.

## A training step of a small model

`python benchmarks/step_tax.py`: LinearModel(10, 1), 64 rows, SGD, one thread. *Ours* is `python train.py` with
everything on: progress, TensorBoard, CSV, loss and R², checkpoints, throughput, memory, the checks of every step, exact
resume. The loops of Lightning run at a terminal too, and are compared with ours there; *full-featured* is a Rich bar,
TensorBoard, CSV, checkpoints, the throughput monitor; the Hydra style logs a mean loss and a metric at every step, from
rows put together one by one. Ratios are to a bare PyTorch loop on views, measured before and after each loop. The
second table leaves one thing out at a time, in one run of the command; the third does without one saving at a time.

{step_tax}

Where it stops: most of the rest is Lightning's own loop, some forty calls with a name to format, a profiler to ask and
a hook to look up in each. The checks of every step come next: a gradient that is not finite must be known before the
update, and Python's and NumPy's generators are seeded with torch's so that a resume is exact; both together are about
0.2 x. A larger model does not feel any of it: the sum is fixed, whatever the step computes.

## Evaluation and prediction

`python benchmarks/evaluation.py`: all rows of two .npy files, in batches of `--data.eval_batch_size`, 4,096 by default.

{evaluation}

## Two processes

`python benchmarks/scaling.py`: gloo, 64 rows and one thread a process, by the clock.

{scaling}

## The start

`python benchmarks/startup.py`: processes of their own, from the first line of Python on.

{startup}

## `--model.compile true`

`python benchmarks/compiled.py`: on the CPU, when all is compiled. So small a net as the first is harmed by it.

{compiled}

## On a GPU

`python benchmarks/gpu.py`

{gpu}
"""


def part(name: str, arguments: list[str]) -> str:
    """What a script prints, its last block, the ratios, in a frame."""
    print(f"{datetime.datetime.now():%H:%M:%S} {name}", file=sys.stderr, flush=True)
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, stdout=-1, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"Not measured: it took more than {LIMIT} s."
    if run.returncode:
        return f"Not measured: it ended with exit code {run.returncode}."
    *tables, last = run.stdout.strip().split("\n\n")
    return "\n\n".join([*tables, f"```text\n{last}\n```"] if tables else [last])


def machine() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        info = []
    cpu = next((line.partition(": ")[2].strip() for line in info if "model name" in line), "CPU")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = f"torch {torch.__version__}, lightning {L.__version__}"
    return f"{os.cpu_count()} cores of an {cpu}{gpu}, {versions}, {datetime.date.today()}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true")
    options.add_argument("parts", nargs="*", help="only these, to the screen")
    asked = options.parse_args()
    if unknown := set(asked.parts) - PARTS.keys():
        options.error(f"{unknown.pop()}: no such part; there are {', '.join(PARTS)}")
    names = asked.parts or [*PARTS]
    found = {name: part(name, PARTS[name][asked.quick]) for name in names}
    if asked.quick or asked.parts:
        print("\n\n".join(found.values()))
        sys.exit(any(text.startswith("Not measured: it") for text in found.values()))
    (ROOT / "docs" / "performance.md").write_text(PAGE.format(machine=machine(), **found))


if __name__ == "__main__":
    main()
