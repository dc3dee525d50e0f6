"""Real runs to do harm to: started as `python train.py ...` would be, but forked from this process, which has imported
everything, so that a start costs a tenth of a second instead of six.

    job = Job(folder, "--max_epochs", "3").when("train", 5).signal("SIGTERM").end()
    assert job.codes == [143]

The net tells how far a run is: ``Slow`` counts its calls in files named ``train`` and ``eval`` beside the run.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only

from project.cli import main
from project.engine.watch import Watch
from project.leftovers import STARTED_BY

SMALL = ("--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "3", "--log_every_n_steps", "5")


class Slow(torch.nn.Linear):
    """One layer that takes its time, and writes down how often each rank has called it."""

    def __init__(self, in_features: int = 10, sleep: float = 0.0) -> None:
        super().__init__(in_features, 1)
        self.sleep, self.calls = sleep, {"train": 0, "eval": 0}

    def forward(self, x):
        if self.training or len(x) != 8:  # not the look at eight rows before a run begins
            kind = "train" if self.training else "eval"
            self.calls[kind] += 1
            Path(f"{kind}-{os.environ.get('LOCAL_RANK', '0')}").write_text(str(self.calls[kind]))
            time.sleep(self.sleep)
        return super().forward(x)


class Job:
    """A run of the command in ``folder``.

    Args:
        folder: Its current folder; the run folder in it is ``run`` unless ``argv`` says otherwise.
        argv: Flags, after those of ``SMALL`` and a net that takes ``sleep`` seconds a call.
        ranks: Processes: of torchrun with ``torchrun``, else of Lightning's own launcher.
        net: The net, by class path.
    """

    def __init__(self, folder, *argv, ranks=1, torchrun=False, sleep=0.05, net="tests.faults.harness.Slow", command=()):
        self.folder, self.ranks = Path(folder), ranks
        for old in ("train", "eval"):
            for path in self.folder.glob(f"{old}-*"):
                path.unlink()
        model = ("--model.net", net, "--model.net.sleep", sleep) if sleep is not None else ()
        self.argv = [str(a) for a in (*command, *SMALL, *model, *argv)]
        if not {"--run_dir", "--resume"} & {*self.argv}:
            self.argv += ["--run_dir", "run"]
        self.screen_path, self.seconds, self.codes = self.folder / "screen", 0.0, []
        if torchrun:
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(ranks)}
            common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # torchrun, too, keeps the store in its own process
            common |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
            self.pids = [self._fork({**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]
        else:
            self.argv += ["--devices", str(ranks)] if ranks > 1 else []
            self.pids = [self._fork({})]
        self.harm = time.monotonic()

    def _fork(self, env):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.setsid()
            _become(self.folder, self.argv, env, self.screen_path)
        while os.getsid(pid) != pid:  # by its session the job is known
            time.sleep(0.001)
        return pid

    # ---- while it runs

    @property
    def screen(self):
        return self.screen_path.read_text() if self.screen_path.exists() else ""

    @property
    def run(self):
        return self.folder / "run"

    def when(self, kind, count, rank=None, timeout=60):
        """Wait until each rank's net (or one rank's) was called ``count`` times in "train" or "eval" mode."""
        ranks = range(self.ranks) if rank is None else [rank]
        paths = [self.folder / f"{kind}-{r}" for r in ranks]
        self.wait(lambda: all(p.exists() and int(p.read_text() or 0) >= count for p in paths), timeout)
        return self

    def wait(self, happened, timeout=60):
        end = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < end, f"it did not happen in {timeout} s:\n{self.screen}"
            assert self._alive(), f"the run ended too soon:\n{self.screen}"
            time.sleep(0.005)
        return self

    def pid(self, rank):
        """The process of a rank, whoever started it."""
        pids = [int(p.read_text()) for p in self.folder.glob("pid-*") if p.name == f"pid-{rank}"]
        return pids[0]

    def workers(self):
        """The processes that read data for rank 0."""
        return [p for p in self._alive() if _parent(p) == self.pid(0) and p not in map(self.pid, range(self.ranks))]

    def signal(self, name, rank=0, everyone=False):
        """Send a signal to one rank, or as a terminal does, to every process of the job."""
        self.harm = time.monotonic()
        for pid in self._alive() if everyone else [self.pid(rank)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))
        return self

    # ---- its end

    def end(self, timeout=30):
        """Wait for the end: exit codes (as a shell shows them), seconds since the harm, and that nothing is left."""
        end = time.monotonic() + timeout
        waiting = list(self.pids)
        codes = {}
        while waiting and time.monotonic() < end:
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    waiting.remove(pid)
                    code = os.waitstatus_to_exitcode(status)
                    codes[pid] = code if code >= 0 else 128 - code
            time.sleep(0.005)
        self.seconds = time.monotonic() - self.harm
        while self._alive() and time.monotonic() < end:  # of those it had started
            time.sleep(0.02)
        left = self._alive()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in waiting:
            os.waitpid(pid, 0)
        assert not waiting, f"still running {timeout} s after the harm:\n{self.screen}"
        assert not left, f"processes left: {left}\n{self.screen}"
        self.codes = [codes[pid] for pid in self.pids]
        return self

    @property
    def last_lines(self):
        return [line for line in self.screen.splitlines() if line.strip()][-3:]

    def checkpoint(self, name="last.ckpt"):
        return torch.load(self.run / "checkpoints" / name, weights_only=True)

    def _alive(self):
        """Processes of the sessions of this job that still run."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) in self.pids and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _become(folder, argv, env, screen):
    """In a forked process: what a new `python train.py ARGV` would do."""
    code = 1
    try:
        os.chdir(folder)
        for name in (
            "LOCAL_RANK",
            "RANK",
            "WORLD_SIZE",
            "NODE_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "PL_GLOBAL_SEED",
            STARTED_BY,
        ):
            os.environ.pop(name, None)
        os.environ |= env
        out = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        rank = int(env.get("LOCAL_RANK", 0))
        rank_zero_only.rank = rank
        logging.getLogger().handlers.clear()  # pytest's
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        Watch.current = None
        subprocess_script.subprocess = SimpleNamespace(
            Popen=lambda command, env, cwd: _Forked(folder, argv, env, screen)
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with Watch():
            main(argv)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            sys.stdout.flush()
        os._exit(code)


class _Forked:
    """What Lightning's launcher needs of the ``Popen`` by which it starts ranks 1, 2, …"""

    def __init__(self, folder, argv, env, screen):
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            _become(folder, argv, env, screen)

    def poll(self):
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
