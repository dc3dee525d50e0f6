"""How much memory is in use, and the most there was. A reading takes some ten microseconds, and there are few."""

import os
import sys
import time

import torch

MB = 2**20
READ_SECONDS = 1.0  # apart at least, on the CPU


class Memory:
    """Readings for one device: of its memory on CUDA; of this process and its workers on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak, self.peak_step = 0.0, 0  # MB on this rank, and the optimizer step by which it was reached
        self.ranks = 1
        self._next = 0.0
        self._last = 0.0

    def read(self, step: int) -> float:
        """MB in use: on CUDA the most allocated since the last reading; on the CPU resident, read once a second."""
        if self.device.type == "cuda":  # pragma: cuda
            self._last = torch.cuda.max_memory_allocated(self.device) / MB
            torch.cuda.reset_peak_memory_stats(self.device)
        elif time.monotonic() >= self._next:
            self._last, self._next = resident() / MB, time.monotonic() + READ_SECONDS
        if self._last > self.peak:
            self.peak, self.peak_step = self._last, step
        return self._last

    def reserved(self) -> float | None:
        """MB that the allocator of a CUDA device holds, in use or cached; None elsewhere."""
        return torch.cuda.memory_reserved(self.device) / MB if self.device.type == "cuda" else None

    def release(self) -> None:
        """Give cached memory back: at the end of a phase, never between steps."""
        if self.device.type == "cuda":  # pragma: cuda
            torch.cuda.empty_cache()

    def note(self, most: float, step: int, ranks: int) -> None:
        """``most`` MB are held by the fullest of all ranks."""
        self.ranks = ranks
        if most > self.peak:
            self.peak, self.peak_step = most, step

    def peak_words(self) -> str:
        """The most there was, when, and what share of the device that is."""
        if not self.peak:  # nothing was read: barebones
            return peak_memory(self.device)
        whole, name = (
            whole_memory(self.device) / MB,
            str(self.device) if self.device.type == "cuda" else "the machine's",
        )
        share = f", {self.peak / whole:.0%} of {name}" if whole else ""
        ranks = f", on the fullest of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.peak:,.0f} MB by step {self.peak_step:,}{share}{ranks}"


def whole_memory(device: torch.device) -> int:
    """Bytes of memory that a CUDA device has, or this machine; 0 where the system does not tell."""
    if device.type == "cuda":  # pragma: cuda
        return torch.cuda.get_device_properties(device).total_memory
    names = getattr(os, "sysconf_names", {})  # not on Windows
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else 0


def peak_memory(device: torch.device) -> str:
    """The most memory this process has held: allocated on an accelerator, resident on the CPU."""
    if device.type == "cuda":  # pragma: cuda
        return f"{torch.cuda.max_memory_allocated(device) / MB:,.0f} MB on {device}"
    try:
        import resource  # not on Windows
    except ImportError:
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MB:,.0f} MB"


def resident() -> int:
    """Bytes that this process and its children hold in memory; 0 where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
    except OSError:
        children = []
    return sum(_resident(pid) for pid in ("self", *children))


def _resident(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux, or a worker that has just ended
        return 0
