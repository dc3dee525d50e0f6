"""A rank or a data worker that fails or is killed: the job ends, not with 0, and says the first cause last."""

import os
import re
import signal
import sys
import time

import lightning as L
import pytest

from tests.faults.harness import Slow

TWO = {"2 processes": {"ranks": 2}, "2 of torchrun": {"ranks": 2, "torchrun": True}}
SLOW = pytest.mark.slow


class Fails(Slow):
    """Raises on rank 1, at its 6th call in "train" or its 4th in "eval" mode."""

    def __init__(self, in_features: int = 10, sleep: float = 0.0, mode: str = "train", rank: int = 1) -> None:
        super().__init__(in_features, sleep)
        self.mode, self.rank = mode, rank

    def forward(self, x):
        out = super().forward(x)
        limit = 6 if self.mode == "train" else 4
        if self.calls[self.mode] >= limit and int(os.environ.get("LOCAL_RANK", 0)) == self.rank:
            raise KeyError("a bug of the user's")
        return out


FAILING = [("2 processes", "train", 1), ("2 processes", "eval", 1), ("2 processes", "train", 0)]
FAILING += [("2 of torchrun", mode, rank) for mode, rank in (("train", 1), ("eval", 1), ("train", 0))]


@pytest.mark.parametrize(
    ("shape", "mode", "rank"), [FAILING[0], *(pytest.param(*case, marks=SLOW) for case in FAILING[1:])]
)
def test_an_exception_on_one_rank(job, table, shape, mode, rank):
    net = ("--model.net.mode", mode, "--model.net.rank", rank)
    sizes = ("--data.eval_batch_size", "2", "--num_sanity_val_steps", "0")
    one = job(*net, *sizes, net="tests.faults.test_ranks.Fails", **TWO[shape]).end()
    assert all(code not in (0, None) for code in one.codes), one.codes
    assert "a bug of the user's" in one.last_lines[-1], one.screen
    assert one.screen.count("Traceback") == 1, one.screen
    table(f"exception on rank {rank}, {mode}, {shape}", f"exit {one.codes[0]}, cause last", one.seconds)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ("2 processes", 1),
        *(pytest.param(s, r, marks=SLOW) for s in TWO for r in (0, 1) if (s, r) != ("2 processes", 1)),
    ],
)
def test_a_rank_that_is_killed(job, table, shape, rank):
    one = job(**TWO[shape]).when("train", 5).signal("SIGKILL", rank).end()
    assert all(code not in (0, None) for code in one.codes), one.codes
    assert "Traceback" not in one.screen, one.screen
    if (shape, rank) == ("2 processes", 1):
        assert "rank 1 was killed by signal 9" in one.last_lines[-1]
    else:
        assert "gone" in one.last_lines[-1], one.screen
    table(f"kill -9 of rank {rank}, {shape}", f"exit {one.codes[0]}", one.seconds)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_other_one_computes(job, table):
    """No collective tells the survivor: the one who started both notices."""
    one = job("--num_sanity_val_steps", "0", ranks=2, sleep=25).when("train", 1).signal("SIGKILL", 1).end()
    assert one.codes == [1]
    assert "rank 1 was killed by signal 9" in one.last_lines[-1]
    table("kill -9 of rank 1 while rank 0 computes", "exit 1", one.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_worker_that_is_killed(job, table, ranks):
    one = job("--data.num_workers", "1", "--data.chunk_size", "16", "--max_epochs", "9", ranks=ranks).when("train", 5)
    one.harm = time.monotonic()
    os.kill(one.workers()[0], signal.SIGKILL)
    one.end()
    assert one.codes == [1]
    # the one if the news comes while the rank computes, the other if it comes while the rank waits for that worker
    assert re.search(r"DataLoader worker .*(signal: Killed|exited unexpectedly)", one.last_lines[-1]), one.screen
    table(f"kill -9 of a data worker, {ranks} processes", "exit 1", one.seconds)


class DiesEarly(L.Callback):
    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == 1:
            print("no room on rank 1", file=sys.stderr)
            os._exit(3)
        time.sleep(25)


@pytest.mark.slow
def test_a_rank_that_dies_before_the_first_step(job, table):
    one = job("--callbacks", "tests.faults.test_ranks.DiesEarly", ranks=2).end()
    assert one.codes == [1]
    assert "rank 1 ended with exit code 3" in one.last_lines[-1]
    table("rank 1 exits before the first step", "exit 1", one.seconds)
