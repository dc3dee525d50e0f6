"""What each flag does to the memory of a run: the table of docs/memory.md.

    python benchmarks/memory.py

One run of the command each, on the CPU in one process: ``Deep``, 4 hidden layers of 1,024, 3 steps of 4,096 rows and
their evaluation. Printed is the most that the process held, as the command says it at its end. bf16-mixed is left out:
without units for it, a CPU takes minutes.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NET = "--model.net project.models.deep.Deep --model.net.width 1024 --model.net.depth 4"
RUN = "--accelerator cpu --max_steps 3 --max_epochs 1 --data.source.rows 40960 --enable_progress_bar false"
CASES = {
    "(as it is)": "",
    "`--data.batch_size 1024 --accumulate_grad_batches 4`": "--data.batch_size 1024 --accumulate_grad_batches 4",
    "`--data.batch_size 256 --accumulate_grad_batches 16`": "--data.batch_size 256 --accumulate_grad_batches 16",
    "`--precision 64-true`": "--precision 64-true",
    "`--optimizer Adam` (SGD keeps nothing)": "--optimizer Adam",
    "`--data.eval_batch_size 16384`": "--data.eval_batch_size 16384 --data.split [0.5,0.4,0.1]",
    "`--data.chunk_size 4096`": "--data.chunk_size 4096",
    "`--data.chunk_size 1000000`": "--data.chunk_size 1000000",
}


def peak(flags: str) -> int:
    """MB that a run with these flags held at most."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"{NET} {RUN} --data.batch_size 4096 {flags} --run_dir {folder}/run".split()
        done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"peak memory ([\d,]+) MB", done.stdout)
    if found is None:
        sys.exit(done.stdout + done.stderr)
    return int(found[1].replace(",", ""))


if __name__ == "__main__":
    print("| flags | peak, MB | difference |\n| --- | --- | --- |", flush=True)
    first = 0
    for name, flags in CASES.items():
        held = peak(flags)
        first = first or held
        print(f"| {name} | {held:,} | {held - first:+,} |", flush=True)
