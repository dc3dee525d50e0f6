"""The run folder: one per job, chosen by rank 0, never shared and never overwritten unasked."""

import contextlib
import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from project.engine.metrics_csv import MetricsCSV
from project.engine.predictions import ENDINGS
from project.resuming import OURS
from project.usage import UsageError


class Run:
    """The folder of one job, reserved at once so that no other job can choose it.

    Args:
        folder: The folder, exactly; None picks ``runs/<name>/<time>``.
        name: The experiment's name.
        resumed: Go on in the folder of an earlier attempt.
        replace: Start anew where an attempt died before its first checkpoint, in place of what it left.

    Raises:
        UsageError: If the folder has something in it, or cannot be made.
    """

    def __init__(self, folder: str | Path | None, name: str, resumed: bool = False, replace: bool = False) -> None:
        self._made: list[Path] = []
        self._resumed = resumed
        self._leftovers: list[Path] = []
        try:
            if resumed:
                self.folder = Path(str(folder))
                return
            self.folder = self._given(Path(folder), replace) if folder else self._new(Path("runs", name))
        except OSError as e:
            wanted = folder or Path("runs", name)
            raise UsageError(f"--run_dir {wanted}: cannot make {e.filename or wanted}: {e.strerror}.") from None

    def _given(self, folder: Path, replace: bool) -> Path:
        if replace and folder.is_dir() and _is_dead_attempt(folder):
            self._leftovers = [folder / name for name in OURS if (folder / name).exists()]
            return folder
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"--run_dir {folder} exists and is not empty: nothing in it is overwritten. Choose another folder."
            )
        self._make(folder)
        with open(
            folder / "environment.json", "x"
        ) as file:  # fails if another job has just taken the same empty folder
            json.dump({"command": shlex.join(sys.argv), "host": platform.node(), "process": os.getpid()}, file)
        return folder

    def _new(self, parent: Path) -> Path:
        now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
            folder = parent / f"{now}{suffix}"
            if not folder.exists():
                self._make(parent)
                try:
                    folder.mkdir()  # fails if another job has just made it
                except FileExistsError:
                    continue
                self._made.append(folder)
                return folder
        raise FileExistsError(0, "too many runs in one second", str(parent))

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def discard(self) -> None:
        """Take back what was made for a run that never began."""
        if self._resumed or self._leftovers:
            return
        for name in OURS:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another job may have come to the same parent
            for folder in reversed(self._made):
                folder.rmdir()

    def record(self, config: str, environment: dict[str, Any], step: int = 0) -> None:
        """Write ``config.yaml`` and ``environment.json``; those before ``step`` keep other names."""
        if self._leftovers:  # only now, when the run begins: nothing is lost for a start that is refused
            aside = _free(self.folder / "attempt-1")
            aside.mkdir()
            for leftover in self._leftovers:
                leftover.replace(aside / leftover.name)
            self._leftovers = []
        for name, text in (("config.yaml", config), ("environment.json", json.dumps(environment, indent=2) + "\n")):
            path = self.folder / name
            if path.exists() and self._resumed:
                if path.read_text() == text:
                    continue
                path.replace(_free(path.with_name(f"{path.stem}-until-step-{step}{path.suffix}")))
            path.write_text(text)

    def ended(self) -> None:
        """Write down that all that was asked is done; a run that stops before is made up for by ``--resume``."""
        path = self.folder / "environment.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "ended": _now()}, indent=2) + "\n")

    def take_profile(self, profiler: object) -> None:
        """A profiler the user asked for writes here, unless it was told where."""
        if isinstance(profiler, Profiler) and not isinstance(profiler, PassThroughProfiler):
            profiler.dirpath = profiler.dirpath or self.folder
            profiler.filename = profiler.filename or "profile"


def loggers(run: Run | None, step: int | None, theirs: Any) -> list[Logger]:
    """TensorBoard and metrics.csv in the run folder; on other ranks, which write nothing, as placeholders.

    Args:
        run: The run, on rank 0.
        step: The optimizer step resumed from; what a dead attempt logged from it on is dropped, or logged again.
        theirs: The user's own, which stand beside ours: one logger, a list of them, or none.
    """
    own = theirs if isinstance(theirs, list) else [theirs] if isinstance(theirs, Logger) else []
    folder = run.folder if run is not None else Path()
    ours = [TensorBoardLogger(folder, name="", version="", sub_dir="tensorboard", purge_step=step), MetricsCSV(folder)]
    return [*(o for o in ours if type(o) not in map(type, own)), *own]


def _told(folder: Path, name: str) -> str:
    """What ``environment.json`` of a run folder says; "" if there is none or it does not."""
    try:
        return str(json.loads((folder / "environment.json").read_text()).get(name) or "")
    except (OSError, ValueError, AttributeError):
        return ""


def has_ended(folder: Path) -> bool:
    """Whether a run has done all that was asked of it, its test too."""
    return bool(_told(folder, "ended"))


def experiment(config: str) -> str:
    """The experiment's name: that of its first config file, and for one kept in a run folder the name that run had."""
    return _told(Path(config).parent, "experiment") or Path(config).stem


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _free(path: Path) -> Path:
    """The path, or one like it that is not taken."""
    numbered = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def _is_dead_attempt(folder: Path) -> bool:
    """Whether a folder holds only what an attempt of ours left that died before its first checkpoint.

    Raises:
        UsageError: If that attempt is still running.
    """
    entries = [p.name for p in folder.iterdir() if not p.name.startswith("attempt-")]
    if not entries or set(entries) - set(OURS) or any(folder.rglob("*.ckpt")):
        return False
    try:
        left = json.loads((folder / "environment.json").read_text())
        host, process = left["host"], left["process"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host == platform.node() and _runs(process):
        raise UsageError(
            f"--run_dir {folder}: process {process} is at work there. Choose another folder, or wait for it."
        )
    return True


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, but running
        return True
    return process != os.getpid()


def output_file(given: str | None, folder: Path) -> Path:
    """Where predictions go; nothing is overwritten."""
    path = Path(given or folder / "predictions.csv")
    if path.suffix not in ENDINGS:
        raise UsageError(f"--output {path}: expected a name that ends in {', '.join(ENDINGS)}.")
    if path.exists():
        raise UsageError(f"--output {path} exists and is not overwritten: choose another name.")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}.")
    return path


def environment(devices: str, name: str) -> dict[str, Any]:
    """What one must know to run a job again: versions, devices, git revision, command."""
    packages = ("torch", "lightning", "torchmetrics", "jsonargparse", "pyarrow", "numpy")
    return {
        "experiment": name,
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "process": os.getpid(),
        "folder": os.getcwd(),
        "started": _now(),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: version(p) for p in packages},
        "cuda": torch.version.cuda,
        "devices": devices,
        "threads": torch.get_num_threads(),
    }


def _git() -> dict[str, Any] | None:
    try:
        where = Path(__file__).parent

        def git(*args: str) -> str:
            return subprocess.run(
                ("git", *args), cwd=where, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()

        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):  # not a checkout, or no git
        return None
