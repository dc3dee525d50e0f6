"""What this machine can train with, on one screen to paste into an issue: ``python -m project.tools.doctor``."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OK, WARNING, FAILED = "ok", "warning", "failed"
Check = tuple[str, str, str, str]  # name, OK, WARNING or FAILED, what was found, what to do
PACKAGES = ("torch", "lightning", "torchmetrics", "jsonargparse", "pyarrow", "tensorboard")
OPTIONAL = ("matplotlib", "onnx", "onnxruntime", "safetensors", "optuna", "wandb", "mlflow-skinny")
LEFT_OVER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
INSTALL = "pip install -r requirements.txt"
GB = 2**30
MEET_SECONDS = 10  # with their start, which takes two or three
ALL_REDUCE = """import datetime, sys, torch, torch.distributed as dist
rank, file, backend, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
dist.init_process_group(backend, f"file://{file}", datetime.timedelta(seconds=seconds), 2, rank)
x = torch.full((1000,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
dist.all_reduce(x)
assert x.eq(3).all(), x
dist.destroy_process_group()
"""


def checks() -> Iterator[Check]:
    """Every check in turn; where one breaks down, that is what was found, and the others go on."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as e:  # whatever a broken installation raises
            yield name, FAILED, f"{type(e).__name__}: {' '.join(str(e).split())[:200]}", INSTALL


def _check(name: str, found: str, todo: str = "", otherwise: str = WARNING) -> Check:
    return name, otherwise if todo else OK, found, todo


def _packages() -> Iterator[Check]:
    todo = "" if sys.version_info >= (3, 10) else "Python 3.10 or later is needed"
    yield _check("python", f"{platform.python_version()}, {platform.platform()}", todo, FAILED)
    for name in PACKAGES:
        found = _version(name)
        try:
            import_module(name)
            stolen = name == "lightning" and found in ("2.6.2", "2.6.3")
            todo = f"a malicious release: remove it, change your passwords and keys, {INSTALL}" if stolen else ""
        except Exception as e:  # a wheel for another system, a library that is missing
            found, todo = f"{found} cannot be imported: {' '.join(str(e).split())[:150]}".strip(), INSTALL
        yield _check(name, found, todo, FAILED)
    yield _check("optional", ", ".join(f"{n} {_version(n)}" for n in OPTIONAL if _version(n)) or "none")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _driver() -> tuple[str, str]:
    """(NVIDIA cards and their driver, the newest CUDA that it runs); "" for what there is not."""
    if shutil.which("nvidia-smi"):
        try:
            said, cards = (
                subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True, timeout=5).stdout
                for flags in ([], ["-L"])
            )
        except (OSError, subprocess.TimeoutExpired):
            return "an NVIDIA driver whose nvidia-smi does not answer", ""
        if names := re.findall(r"^GPU \d+: (.*?)(?: \(UUID|$)", cards, re.M):
            driver, cuda = (re.search(rf"{what} Version:\s*([\d.]+)", said) for what in ("Driver", "CUDA"))
            return f"{', '.join(names)} (driver {driver[1] if driver else '?'})", cuda[1] if cuda else ""
    return ("an NVIDIA card", "") if Path("/proc/driver/nvidia/version").exists() else ("", "")


def _devices() -> Iterator[Check]:
    import torch

    from project.devices import why_no_gpu

    (cards, most), built, todo = _driver(), torch.version.cuda, ""
    found = f"torch is built for CUDA {built}, the driver runs up to {most or '?'}"
    if torch.cuda.is_available():  # pragma: cuda
        if most and built and int(most.split(".")[0]) < int(built.split(".")[0]):
            todo = f"update the driver, or install a torch for CUDA {most}"
    elif cards:
        found = f"there is {cards}, but {why_no_gpu()}"
        todo = f"a torch with CUDA (the driver runs up to {most or '?'}) from https://pytorch.org/get-started"
        if built:
            todo = f"nvidia-smi should work and show CUDA {built} or later; if not, update the driver"
    else:
        found = f"no GPU: {why_no_gpu()}"
    yield _check("cuda", found, todo)
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), "")
    todo = "" if compiler else "--model.compile on the CPU needs a C++ compiler: apt install g++"
    yield _check("compiler", compiler or "no C++ compiler", todo)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):  # pragma: cuda
        card, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        bf16 = "yes" if torch.cuda.is_bf16_supported(False) else "no"
        compiles = "yes" if card.major >= 7 and _version("triton") else "no"
        found = f"{card.name}, {free / GB:.1f} of {total / GB:.1f} GB free, capability {card.major}.{card.minor}"
        full = "others hold its memory: see nvidia-smi" if free < total / 10 else ""
        yield _check(f"cuda:{i}", f"{found}, bf16 {bf16}, compile {compiles}", full)
    if torch.backends.mps.is_available():
        yield _check("mps", f"Apple GPU, {torch.mps.recommended_max_memory() / GB:.1f} GB, no float64")


def _limits() -> Iterator[Check]:
    usable = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    allowed, _, period = quota.read_text().partition(" ") if quota.exists() else ("max", "", "")
    cores = usable if allowed == "max" else min(usable, int(allowed) / int(period))
    todo = f"of {usable:g} the container may use {cores:g}: OMP_NUM_THREADS={max(1, int(cores))}"
    yield _check("cores", f"{cores:g} usable of {os.cpu_count()}", todo if cores < usable else "")
    if Path("/dev/shm").exists():
        free = shutil.disk_usage("/dev/shm").free / GB
        todo = "" if free > 0.5 else "--data.num_workers may fail; in Docker: --shm-size=2g"
        yield _check("shared memory", f"{free:.1f} GB free", todo)
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        todo = "ulimit -n 4096" if 0 <= soft < 1024 else ""
        yield _check("open files", f"at most {soft}, on demand {hard}", todo)
    free = shutil.disk_usage(".").free / GB
    yield _check("disk", f"{free:.1f} GB free in {Path.cwd()}", "" if free > 1 else "--run_dir on another disk")
    if not os.access(".", os.W_OK):
        yield _check("folder", f"{Path.cwd()} cannot be written to", "start where run folders can be made", FAILED)
    left = ", ".join(f"{name}={os.environ[name]}" for name in LEFT_OVER if name in os.environ)
    yield _check("launcher", left or "none", "unset what is left over, or a start waits for others" if left else "")


def _speed() -> Iterator[Check]:
    import torch

    def seconds(device: str, work: Callable[[], object]) -> float:
        """The least of three, after a first."""
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            work()
            if device != "cpu":  # pragma: cuda
                getattr(torch, device.partition(":")[0]).synchronize()
            times.append(time.perf_counter() - begun)
        return max(1e-9, min(times[1:]))

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu: dict[int, float] = {}
    for device in ("cpu", *(f"cuda:{i}" for i in range(count)), *["mps"] * torch.backends.mps.is_available()):
        words, slow = [], ""
        for n in (1000, 2000) if device == "cpu" else (1000, 2000, 8000):
            a = torch.randn(n, n, device=device)
            rate = 2e-12 * n**3 / seconds(device, partial(torch.matmul, a, a))
            ratio = f" ({rate / cpu[n]:,.3g} x the CPU)" if device != "cpu" and n in cpu else ""
            words.append(f"{rate:.3g}{ratio} at {n} x {n}")
            slow = "slower than the CPU: is it busy?" if rate < cpu.setdefault(n, rate) and n >= 2000 else ""
        yield _check(f"product, {device}", "TFLOP/s in float32: " + ", ".join(words), slow)
        if device.startswith("cuda"):  # pragma: cuda
            host = torch.empty(GB // 4, dtype=torch.uint8)
            rates = [len(h) / 1e9 / seconds(device, partial(h.to, device)) for h in (host, host.pin_memory())]
            yield _check(f"transfer, {device}", "{:.1f} GB/s, {:.1f} from pinned memory".format(*rates))


def _all_reduce() -> Iterator[Check]:
    import torch

    for backend in ("gloo", *["nccl"] * (torch.cuda.is_available() and torch.cuda.device_count() > 1)):
        env = {k: v for k, v in os.environ.items() if k not in LEFT_OVER} | {"OMP_NUM_THREADS": "1"}
        begun, wrong, ranks = time.monotonic(), "", []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(2):
                    words = str(rank), f"{folder}/meet", backend, str(MEET_SECONDS)
                    command = [sys.executable, "-c", ALL_REDUCE, *words]
                    ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env))
                for process in ranks:
                    said = process.communicate(timeout=max(0.1, MEET_SECONDS + begun - time.monotonic()))[1]
                    if process.returncode and not wrong:
                        wrong = f"fails: {(said.strip() or 'without a word').splitlines()[-1][:200]}"
            except subprocess.TimeoutExpired:
                wrong = f"two processes were not done in {MEET_SECONDS} s"
            finally:
                for process in ranks:
                    process.kill()
                    process.communicate()
        found = wrong or f"two processes, {time.monotonic() - begun:.1f} s with their start"
        todo = "one device works, --devices 2 may not; try GLOO_SOCKET_IFNAME=lo, look at the firewall"
        yield _check(f"all-reduce, {backend}", found, todo if wrong else "")
        if wrong:
            return


CHECKS = {"packages": _packages, "devices": _devices, "limits": _limits, "speed": _speed, "all-reduce": _all_reduce}


def main(argv: list[str] | None = None) -> None:
    """Exit codes: 0 training can run, perhaps with warnings; 1 it cannot; 2 wrong use."""
    parser = argparse.ArgumentParser("python -m project.tools.doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for programs")
    asked, found = parser.parse_args(argv), []
    for name, status, words, todo in checks():
        found.append({"name": name, "status": status, "found": words, "todo": todo})
        if not asked.json:
            mark = {OK: "OK     ", WARNING: "WARNING", FAILED: "FAILED "}[status]
            print(f"{mark} {name:<18} {words}" + (f"\n{'':<27}→ {todo}" if todo else ""), flush=True)
    fine = all(check["status"] != FAILED for check in found)
    if asked.json:
        print(json.dumps({"ok": fine, "checks": found}, indent=2))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
