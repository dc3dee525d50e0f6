"""Signals, and processes of the job that die: watched by a thread from the first line of the command to its last.

A thread, since the main one may be waiting in C++ – for a rank that never comes, for a disk – where no Python handler
runs. The handler in C writes the number of each signal into a socket (``signal.set_wakeup_fd``); the thread reads it.
Imports nothing that takes time, so that Ctrl-C works during the seconds in which torch is imported.
"""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, ClassVar, NoReturn

SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n))
REPEAT = 0.5  # seconds: torchrun passes on to its processes what the terminal has sent them already
GRACE = 5.0  # seconds that a process has to end by itself once another one has failed
POLL = 0.5
LOST = re.compile(r"closed by peer|reset by peer|broken pipe|gloo|nccl|tcpstore|socket|barrier|connection", re.I)


class Stopped(SystemExit):
    """Raised by all ranks after the same step, when a signal asked for it."""


class Watch:
    """``with Watch():`` around a whole command.

    A signal ends the command at once with 128 + its number, unless training has said that it will stop by itself:
    then the first one is remembered in ``received``, and a second Ctrl-C still leaves at once. A process whose launcher
    is gone leaves too. When one of several ranks fails, the others end, and rank 0 says the first cause last.
    """

    current: ClassVar["Watch | None"] = None

    def __init__(self) -> None:
        self.received = 0
        self.graceful = False  # somebody looks at ``received`` and stops in good order
        self.children: list[subprocess.Popen[bytes]] = []  # ranks 1, 2, … of a job that this process launched
        self.launched = int(os.environ.get("LOCAL_RANK", "0")) > 0 or "TORCHELASTIC_RUN_ID" in os.environ
        self._ending = False

    def __enter__(self) -> "Watch":
        self._parent = os.getppid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.settimeout(POLL)
        self._old = {n: signal.getsignal(n) for n in SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        Watch.current = self
        self.listen()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        return self

    def listen(self) -> None:
        """Install the handlers, in place of those that Lightning may have put there."""
        for number in SIGNALS:
            signal.signal(number, _noted)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending = True
        failed = error is not None and not isinstance(error, Stopped) and getattr(error, "code", 1) not in (0, None)
        if failed and (self.children or _rank() is not None):
            assert error is not None
            self._fail(error)
        self._end_children(GRACE if failed else 2 * GRACE)
        Watch.current = None
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    # ---- the thread

    def _watch(self) -> None:
        first = failed = 0.0
        while Watch.current is self:
            try:
                numbers = self._reader.recv(64)
            except TimeoutError:
                numbers = b""
            except OSError:  # closed: the command is over
                return
            now = time.monotonic()
            for number in numbers:
                if number not in SIGNALS:  # another part has handlers of its own
                    continue
                again = number == signal.SIGINT and now - first > REPEAT
                if not self.graceful or (self.received and again):
                    self.leave(128 + number, "" if self.launched else f"stopped by {signal.Signals(number).name}")
                if not self.received:
                    self.received, first = number, now
            if self.launched and os.getppid() != self._parent:
                self.leave(1, "the process that started this one is gone")
            if not self._ending and (dead := self._dead_child()):
                failed = failed or now
                if now - failed > GRACE:
                    self.leave(1, _first_cause() or dead)

    def _dead_child(self) -> str:
        """What became of a rank that failed, in words."""
        for rank, child in enumerate(self.children, 1):
            if code := child.poll():
                killed = f"was killed by signal {-code}{' (out of memory?)' * (code == -9)}"
                return f"rank {rank} {killed if code < 0 else f'ended with exit code {code}'}"
        return ""

    def leave(self, code: int, words: str = "") -> NoReturn:
        """End this process and those it started, at once."""
        for rank in self.children:
            rank.kill()
        for worker in multiprocessing.active_children():
            worker.kill()
        if words:
            os.write(2, f"\ntrain.py: {words}\n".encode())
        os._exit(code)

    # ---- failures of several ranks

    def _fail(self, error: BaseException) -> NoReturn:
        rank = _rank() or 0
        said = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        lines = [line for line in str(said).splitlines() if line.strip()] or [""]
        kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        cause = f"rank {rank}: {kind}{lines[0]}"
        echo = not isinstance(error, SystemExit) and bool(LOST.search(cause))
        first = ""
        if echo:  # the connection to a rank that failed, or was killed
            first = _first_cause(wait=GRACE / 2) or self._dead_child()
            cause = f"rank {rank}: another rank is gone without a word; killed, or out of memory? ({lines[0][:200]})"
        first = first or _first_cause(cause)
        if first == cause and not isinstance(error, SystemExit):
            _tell_torchrun(error)
            if not echo:
                traceback.print_exception(error)
        self._end_children(GRACE)
        if (echo and first == cause) or (rank == 0 and first != cause):
            print(f"train.py: error: {first}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        code = getattr(error, "code", 1)
        os._exit(code if isinstance(code, int) else 1)

    def _end_children(self, seconds: float) -> None:
        """Give the ranks that this process started some time to end by themselves."""
        end = time.monotonic() + seconds
        for child in self.children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _noted(number: int, frame: Any) -> None:
    """What is to be done is done by the thread."""


def _distributed() -> Any:
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _rank() -> int | None:
    """This process's rank; None if it is alone."""
    dist = _distributed()
    return int(dist.get_rank()) if dist is not None and dist.get_world_size() > 1 else None


def _first_cause(mine: str = "", wait: float = 0.0) -> str:
    """What the first rank to fail has said: ``mine``, if no other has; "" if none has within ``wait`` seconds."""
    dist = _distributed()
    if dist is None:
        return mine
    end = time.monotonic() + wait
    try:  # the store outlives the ranks' connections, but not the process that holds it
        store = dist.distributed_c10d._get_default_store()
        if mine:
            return str(store.compare_set("first_cause", "", mine).decode())
        while not store.check(["first_cause"]):
            if time.monotonic() > end:
                return ""
            time.sleep(POLL / 5)
        return str(store.get("first_cause").decode())
    except Exception:
        return mine


def _tell_torchrun(error: BaseException) -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, SystemExit):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
