"""Search settings with Optuna: ``python -m project.tools.sweep --config … --sweep 'optimizer.lr=log:1e-4..1e-1'``."""

import argparse
import contextlib
import csv
import fcntl
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from project.usage import Failed, UsageError

TRAIN = Path(__file__).parents[2] / "train.py"
POLL_SECONDS = 0.3
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


class Dimension:
    """A setting to search: ``NAME=1..8`` (whole numbers), ``NAME=0.1..0.9``, ``NAME=log:1e-4..1e-1`` or ``NAME=a,b,c``.

    Raises:
        UsageError: If it is none of these.
    """

    def __init__(self, text: str) -> None:
        name, _, values = text.partition("=")
        self.name, self.choices, self.log = name.strip().lstrip("-"), [], values.startswith("log:")
        if found := re.fullmatch(rf"(?:log:)?({NUMBER})\.\.({NUMBER})", values.strip()):
            self.whole = all(re.fullmatch(r"[+-]?\d+", n) for n in found.groups())
            self.low, self.high = (int(n) if self.whole else float(n) for n in found.groups())
            fine = self.low < self.high and (self.low > 0 or not self.log)
        else:
            listed = yaml.safe_load(f"[{values}]")
            self.choices = [c if isinstance(c, str) else json.dumps(c) for c in listed]  # as they are typed
            fine = len(listed) > 1 and not self.log
        if not self.name or not fine:
            raise UsageError(
                f"--sweep {text}: expected NAME=LOW..HIGH, NAME=log:LOW..HIGH (0 < LOW) or NAME=A,B,…, "
                "as in optimizer.lr=log:1e-4..1e-1, data.batch_size=16,32,64 or model.net.hidden=8..64."
            )

    def suggest(self, trial: Any) -> str:
        """The value of a trial, as a flag."""
        if self.choices:
            return f"--{self.name}={trial.suggest_categorical(self.name, self.choices)}"
        ask = trial.suggest_int if self.whole else trial.suggest_float
        return f"--{self.name}={ask(self.name, self.low, self.high, log=self.log)}"


class Sweep:
    """Trials of ``train.py``, each a process with a run folder of its own. Any number of sweeps may share a folder.

    Args:
        asked: What was typed.
        flags: Flags of ``train.py`` for every trial.

    Raises:
        UsageError: If optuna is missing, or the folder holds another sweep.
    """

    def __init__(self, asked: argparse.Namespace, flags: list[str]) -> None:
        try:
            import optuna
            from optuna.storages import journal
        except ImportError:
            raise UsageError("A sweep needs optuna: pip install optuna") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.states, self.folder, self.flags = optuna.trial.TrialState, asked.sweep_dir, flags
        self.child: subprocess.Popen[bytes] | None = None
        self.dimensions = [Dimension(text) for text in asked.sweep]
        self.metric, self.mode, self.wanted = asked.metric, asked.mode, asked.trials
        median, none = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1), optuna.pruners.NopPruner()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.alone():
            backend = journal.JournalFileBackend(str(self.folder / "study.journal"))
            self.study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                sampler=optuna.samplers.TPESampler(constant_liar=True),
                pruner=none if asked.pruner == "none" else median,
                study_name="sweep",
                direction="minimize" if self.mode == "min" else "maximize",
                load_if_exists=True,
            )
            what = {"sweep": asked.sweep, "flags": flags, "metric": self.metric, "mode": self.mode}
            for key, was in self.study.user_attrs.items():
                if was != what[key]:
                    raise UsageError(f"--sweep_dir {self.folder} holds another sweep: {key} {was}, now {what[key]}.")
            for key, value in what.items():
                self.study.set_user_attr(key, value)
            for trial in self.study.get_trials(False, (self.states.RUNNING,)):
                host, process = trial.user_attrs["owner"]
                if host == platform.node() and not _alive(process):
                    self.give_up(trial)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Whatever several processes must not do at once."""
        with open(self.folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def give_up(self, trial: Any) -> None:
        """A trial that was interrupted is done again, by whoever goes on."""
        self.study.tell(trial.number, state=self.states.FAIL)
        self.study.enqueue_trial(trial.params)

    def count(self) -> Counter[str]:
        """How many trials there are by state, without those that were interrupted."""
        trials = self.study.get_trials(deepcopy=False)
        return Counter(t.state.name.lower() for t in trials if t.state != self.states.FAIL or "end" in t.user_attrs)

    def run(self) -> None:
        """Trial after trial, until there are as many as were asked for.

        Raises:
            UsageError, Failed: If the very first is refused, or none was completed.
        """
        while True:
            with self.alone():
                counts = self.count()
                if counts.total() - counts["waiting"] >= self.wanted:
                    break
                trial = self.study.ask()
                trial.set_user_attr("owner", [platform.node(), os.getpid()])
                flags = [d.suggest(trial) for d in self.dimensions]
            try:
                code, pruned = self.train(trial, flags)
            except BaseException:  # Ctrl-C, SIGTERM: leave nothing running, nothing half done
                _stop(self.child)
                with self.alone():
                    self.give_up(trial)
                raise
            self.end(trial, code, pruned)
        words = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
        print(f"sweep       {self.folder}: {words}")
        if not counts["complete"]:
            raise Failed(f"No trial was completed; the reasons are above and in {self.folder}/trial-*.log.")
        best = self.study.best_trial
        print(f"best        trial {best.number}, {self.metric} {best.value:.6g}  {_words(best.params)}")
        print(f"again       python train.py --config {self.folder / 'best.yaml'}")

    def train(self, trial: Any, flags: list[str]) -> tuple[int, bool]:
        """Run a trial, stopping it if it does worse than others did; its exit code, and whether it was pruned."""
        run, told = self.folder / f"trial-{trial.number:04}", 0
        command = [sys.executable, str(TRAIN), "fit", *self.flags, *flags, "--run_dir", str(run)]
        with open(f"{run}.log", "w") as log:
            self.child = child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        while child.poll() is None:
            time.sleep(POLL_SECONDS)
            values = self.values(run)
            for told in range(told, len(values)):  # noqa: B020  # the n-th value, whatever the batch size
                trial.report(values[told], told)
            told = len(values)
            if values and trial.should_prune() and child.poll() is None:
                _stop(child)
                return child.returncode, True
        return child.returncode, False

    def values(self, run: Path) -> list[float]:
        """What was reported of the metric so far, if finite."""
        path = run / "metrics.csv"
        rows = csv.DictReader(path.read_text().rpartition("\n")[0].splitlines()) if path.exists() else []
        texts = [row.get(self.metric) for row in rows]
        return [float(text) for text in texts if text and math.isfinite(float(text))]

    def end(self, trial: Any, code: int, pruned: bool) -> None:
        """Tell the study, and the user in one line."""
        run = self.folder / f"trial-{trial.number:04}"
        values, lines = self.values(run), Path(f"{run}.log").read_text().splitlines() or ["no output"]
        if pruned:
            state, end = self.states.PRUNED, f"pruned at {self.metric} {values[-1]:.6g}"
        elif code or not values:
            why = f", exit code {code}: {next((x for x in lines if 'error' in x), lines[-1])}"
            why = why if code else f": no finite {self.metric} in {run}/metrics.csv"
            state, end = self.states.FAIL, f"failed{why}"
        else:
            state, best = self.states.COMPLETE, (min if self.mode == "min" else max)(values)
            end = f"{self.metric} {best:.6g}"
        trial.set_user_attr("end", end)
        with self.alone():
            self.study.tell(trial, best if state == self.states.COMPLETE else None, state)
            if state == self.states.COMPLETE and self.study.best_trial.number == trial.number:
                shutil.copyfile(run / "config.yaml", self.folder / "best.tmp")
                os.replace(self.folder / "best.tmp", self.folder / "best.yaml")
        print(f"trial {trial.number:<6}{_words(trial.params)}  {end}", flush=True)
        if code == 2 and not self.count()["complete"]:
            raise UsageError(f"A trial was refused before any was completed:\n{chr(10).join(lines[-4:])}")


def _words(params: dict[str, Any]) -> str:
    return "  ".join(f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in params.items())


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as e:
        return isinstance(e, PermissionError)  # somebody else's
    return True


def _stop(child: Any) -> None:
    """SIGTERM: it finishes its step, saves and leaves."""
    if child is not None and child.poll() is None:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def main(argv: list[str] | None = None) -> None:
    """Exit codes: 0 as many trials as asked for, at least one complete; 1 none complete; 2 wrong use; 130, 143."""
    words = f"{__doc__} All other flags go to train.py."
    parser = argparse.ArgumentParser("python -m project.tools.sweep", description=words, allow_abbrev=False)
    parser.add_argument("--sweep", action="append", required=True, metavar="NAME=VALUES", help=Dimension.__doc__)
    parser.add_argument("--sweep_dir", type=Path, required=True, help="its folder; one that is there goes on")
    parser.add_argument("--trials", type=int, default=20, help="in all, failed and pruned ones too [20]")
    parser.add_argument("--metric", default="val/loss", help="of metrics.csv; its best value counts [val/loss]")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="[min]")
    parser.add_argument("--pruner", choices=("median", "none"), default="median", help="[median]")
    asked, flags = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if own := [f for f in flags if f.partition("=")[0] in ("--run_dir", "--resume", "--ckpt_path")]:
            raise UsageError(f"{own[0]}: each trial has a run folder of its own, in --sweep_dir.")
        Sweep(asked, flags).run()
    except UsageError as e:
        print(f"sweep: error: {e}", file=sys.stderr)
        sys.exit(e.code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
