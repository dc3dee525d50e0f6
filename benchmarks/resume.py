"""How many stops were resumed exactly: a checkpoint at every hook, and kill -9 at random moments.

    python benchmarks/resume.py [--kills 50]

The comparisons are those of ``tests/test_resume.py`` and ``tests/test_kills.py``: weights bit-equal to the run that was
never stopped, the same rows, steps and validations; after kills also the rows of metrics.csv. A difference is an error.
"""

import argparse
import copy
import logging
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch

from tests.test_kills import killed_again_and_again
from tests.test_resume import SWEEP, sweep


def run() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=50)
    asked = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, Lightning {L.__version__}\n")
    print(f"{'accumulation':<14}{'limit':<16}{'validation':<34}{'resumed exactly':>16}")
    total = 0
    for accumulate, limit, interval in copy.deepcopy(SWEEP):
        with tempfile.TemporaryDirectory() as folder:
            count = sweep(Path(folder), accumulate, limit, interval, every=1)
        total += count
        name, value = list(limit.items())[-1]
        words = ", ".join(f"{n} {v}" for n, v in interval.items()).replace(
            "check_val_every_n_epoch None, ", "over epochs, "
        )
        print(f"{accumulate:<14}{f'{name} {value}':<16}{words or 'every epoch':<34}{count:>16}", flush=True)
    print(f"checkpoints at every hook, resumed exactly: {total} of {total}")
    for words, temporary in (("on one disk", tempfile.gettempdir()), ("temporary files on another", "/dev/shm")):
        if Path(temporary).is_dir():
            with tempfile.TemporaryDirectory() as folder:
                killed = killed_again_and_again(Path(folder), (asked.kills + 1) // 2, temporary)
            print(f"kill -9, {words}: killed {killed} times, ends bit-equal", flush=True)


if __name__ == "__main__":
    run()
