"""Going on from the command line: --resume, --resume auto, --ckpt_path, --init_weights, who wins: RES-05, CLI-04."""

import csv
import json
import os
import platform
import shutil
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.cli import main

SMALL = """
model:
  net: {class_path: project.models.LinearModel, init_args: {out_features: 1}}
  metrics: {r2: {class_path: torchmetrics.R2Score}}
data:
  source: {class_path: project.data.sources.SyntheticSource, init_args: {rows: 500, features: 3}}
  batch_size: 8
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
trainer: {max_epochs: 2, log_every_n_steps: 10, accelerator: cpu}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; returns exit code, screen and errors."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)

    def command(*argv, config="small.yaml"):
        code = 0
        try:
            main([*argv, *(["--config", config] if config else [])])
        except SystemExit as e:
            code = e.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def last(folder):
    return torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)


def rows(folder):
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def equal(a, b):
    return all(torch.equal(a["state_dict"][n], b["state_dict"][n]) for n in a["state_dict"])


def snapshot(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in Path(folder).rglob("*") if p.is_file()}


OF_THE_MACHINE = ("rows_per_s", "steps_per_s", "memory_mb")


def logged(folder):
    """What metrics.csv holds, a row a step: all but speed and memory. Its steps rise."""
    found = [{n: float(v) for n, v in row.items() if v and n not in OF_THE_MACHINE} for row in rows(folder)]
    steps = [row["step"] for row in found]
    assert steps == sorted(set(steps))
    return {row.pop("step"): row for row in found}


def next_second():
    """TensorBoard orders the files of two attempts by the second at which they were begun."""
    time.sleep(1.01 - time.time() % 1)


def curves(folder):
    """What TensorBoard shows, a value for each step: all but speed and memory. No step is there twice."""
    events = EventAccumulator(str(Path(folder) / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in {*events.Tags()["scalars"]} - {*OF_THE_MACHINE}:
        values = [(e.step, e.value) for e in events.Scalars(tag)]
        if tag != "epoch":  # of each value's own event
            assert len(values) == len(dict(values)), tag
        found[tag] = dict(values)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped; not to be written to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(SMALL)
    main(["--config", str(folder / "small.yaml"), "--run_dir", str(folder / "run")])
    return folder / "run"


def assert_same_record(folder, whole="whole"):
    """Weights to the last bit; every value of every step in metrics.csv and TensorBoard; nothing besides."""
    assert equal(last(whole), last(folder))
    for record in (logged, curves):
        a, b = record(whole), record(folder)
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-12), (record, key)


def test_resume_goes_on_in_the_same_folder_as_if_never_stopped(run, whole):
    assert run("--run_dir", "cut", "--max_steps", "37", "--limit_test_batches", "0")[0] == 0
    assert {"train/loss"} < logged("cut")[37.0].keys()  # of the steps since the last report: nothing is lost meanwhile
    next_second()
    code, out, _ = run("--resume", "cut", "--max_steps", "-1", "--limit_test_batches", "1.0", config=None)
    assert code == 0
    assert "resume      cut/checkpoints/last.ckpt, after optimizer step 37" in out
    assert "changed     trainer.max_steps: 37 → -1" in out
    assert_same_record("cut", whole)
    assert Path("cut/config-until-step-37.yaml").exists()


class FailsOnce(L.Callback):
    """A bug of the user's in any hook."""

    def __init__(self, hook: str, step: int, calls: int = 0) -> None:
        self.step, self.calls = step, calls
        setattr(self, hook, self.fail)

    def fail(self, trainer, *_):
        if trainer.global_step >= self.step and not Path("failed").exists():
            self.calls -= 1
            if self.calls < 0:
                Path("failed").touch()
                raise ArithmeticError("a bug of the user's")


def failing(hook, step, calls=0):
    arguments = f"{{hook: {hook}, step: {step}, calls: {calls}}}"
    return ("--trainer.callbacks", f"[{{class_path: tests.test_resuming.FailsOnce, init_args: {arguments}}}]")


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_end", 37),
        ("on_validation_epoch_end", 50),
        ("on_test_epoch_end", 100),
        pytest.param("on_train_batch_end", 40, marks=pytest.mark.slow),
        pytest.param("on_validation_batch_end", 50, marks=pytest.mark.slow),
        pytest.param("on_validation_end", 50, marks=pytest.mark.slow),
        pytest.param("on_train_epoch_end", 50, marks=pytest.mark.slow),
        pytest.param("on_train_epoch_end", 100, marks=pytest.mark.slow),
        pytest.param("on_fit_end", 100, marks=pytest.mark.slow),
    ],
)
def test_after_a_failure_in_any_hook_nothing_is_missing_and_nothing_doubled(run, whole, hook, step):
    with pytest.raises(ArithmeticError):
        run("--run_dir", "cut", *failing(hook, step))
    next_second()
    code, out, _ = run("--resume", "cut", config=None)
    assert code == 0
    assert "tested      best-step=100.ckpt, the best by val/loss (" in out
    assert_same_record("cut", whole)
    assert "complete" in run("--resume", "cut", config=None)[1]


def test_a_failure_inside_an_accumulation_window_counts_its_micro_batches_once(run):
    three = ("--accumulate_grad_batches", "3", "--log_every_n_steps", "4")
    run("--run_dir", "whole", *three)
    with pytest.raises(ArithmeticError):
        run("--run_dir", "cut", *three, *failing("on_train_batch_end", 9, calls=2))
    assert last("cut")["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == 29
    next_second()
    assert run("--resume", "cut", config=None)[0] == 0
    assert_same_record("cut")


def test_rows_of_an_attempt_that_died_after_its_checkpoint_go_and_late_columns_come(run):
    every = ("--checkpoint.every_n_train_steps", "30", "--max_epochs", "3")
    run("--run_dir", "whole", *every)
    with pytest.raises(ArithmeticError):
        run("--run_dir", "cut", *every, *failing("on_train_batch_start", 55))
    saved = torch.load("cut/checkpoints/last.ckpt", weights_only=True)
    run("--run_dir", "older", *every, "--max_steps", "30", "--limit_test_batches", "0")
    shutil.copy("older/checkpoints/last.ckpt", "cut/checkpoints/last.ckpt")  # as if killed: the end was not saved
    assert saved["global_step"] == 55
    next_second()
    assert run("--resume", "cut", config=None)[0] == 0
    assert_same_record("cut")


def test_the_line_of_an_epoch_tells_only_how_fast_this_attempt_was(run):
    run("--run_dir", "cut", "--max_epochs", "1")
    _, out, _ = run("--resume", "cut", "--max_epochs", "2", config=None)
    first, second = (line for line in out.splitlines() if line.startswith("epoch "))
    assert "rows/s" not in first  # it was over before
    assert "train/r2" in first
    assert "rows/s" in second


def test_a_rerun_of_a_saved_config_bears_the_name_of_its_experiment(run):
    _, out, _ = run("--max_steps", "5")
    (folder,) = Path("runs/small").iterdir()
    _, out, _ = run("--max_steps", "6", config=str(folder / "config.yaml"))
    assert "run folder  runs/small/" in out
    assert len([*Path("runs/small").iterdir()]) == 2


def test_another_score_to_monitor_leaves_the_old_best_under_a_name_that_says_so(run):
    run("--run_dir", "cut", "--max_epochs", "1")
    code, out, _ = run("--resume", "cut", "--max_epochs", "2", "--checkpoint.monitor", "val/r2", config=None)
    assert code == 0
    assert "best-step=50.ckpt, the best by val/loss (min), is kept as best-val-loss-step=50.ckpt" in out
    assert "the best by val/r2 (max) and last.ckpt" in out  # R² knows that more is better
    assert {p.name for p in Path("cut/checkpoints").iterdir()} == {
        "last.ckpt",
        "best-step=100.ckpt",
        "best-val-loss-step=50.ckpt",
    }


def test_a_complete_run_says_so_and_touches_nothing(run, whole):
    before = snapshot(whole)
    code, out, _ = run("--resume", str(whole), config=None)
    assert code == 0
    assert f"complete    {whole}/checkpoints/last.ckpt" in out
    assert snapshot(whole) == before


def test_larger_limits_go_on(run):
    run("--run_dir", "done", "--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "100")
    code, out, _ = run("--resume", "done", "--max_epochs", "3", config=None)
    assert code == 0
    assert "changed     trainer.max_epochs: 2 → 3" in out
    assert "schedule    CosineAnnealingLR goes on from" in out
    assert last("done")["global_step"] == 150


def test_resume_auto_starts_and_then_goes_on(run):
    assert run("--resume", "auto", "--run_dir", "job", "--max_steps", "20")[0] == 0
    assert last("job")["global_step"] == 20
    assert run("--resume", "auto", "--run_dir", "job", "--max_steps", "30")[0] == 0
    assert last("job")["global_step"] == 30


def test_resume_auto_replaces_what_an_attempt_without_a_checkpoint_left(run):
    Path("job/tensorboard").mkdir(parents=True)
    Path("job/config.yaml").write_text("trainer: {}")
    dead = {"command": "python train.py", "host": platform.node(), "process": 2**22 + 1}  # above any process number
    Path("job/environment.json").write_text(json.dumps(dead))
    Path("job/metrics.csv").write_text("step,x\n1,2\n")
    assert run("--resume", "auto", "--run_dir", "job", "--max_steps", "20")[0] == 0
    assert next(r["step"] for r in rows("job")) == "10"
    assert Path("job/attempt-1/metrics.csv").read_text() == "step,x\n1,2\n"  # moved aside, not lost


@pytest.mark.parametrize("left", ["config.yaml", "checkpoints/best-step=5.ckpt", "metrics.csv"])
def test_resume_auto_never_touches_what_may_be_the_users_or_worth_keeping(run, left):
    Path("job/checkpoints").mkdir(parents=True)
    Path("job", left).write_text("mine")
    code, _, err = run("--resume", "auto", "--run_dir", "job")
    assert code == 2
    assert "exists and is not empty" in err
    assert Path("job", left).read_text() == "mine"


def test_resume_auto_leaves_a_job_that_is_running_alone(run):
    Path("job").mkdir()
    alive = {"command": "python train.py", "host": platform.node(), "process": os.getppid()}
    Path("job/environment.json").write_text(json.dumps(alive))
    before = snapshot("job")
    code, _, err = run("--resume", "auto", "--run_dir", "job")
    assert code == 2
    assert f"process {os.getppid()} is at work there" in err
    assert snapshot("job") == before


def test_resume_auto_does_not_replace_what_is_not_a_run(run):
    Path("job").mkdir()
    Path("job/thesis.tex").write_text("years of work")
    code, _, err = run("--resume", "auto", "--run_dir", "job")
    assert code == 2
    assert "exists and is not empty" in err
    assert Path("job/thesis.tex").read_text() == "years of work"


def test_ckpt_path_goes_on_in_a_new_folder_and_leaves_the_old_one(run, whole):
    run("--run_dir", "cut", "--max_steps", "37")
    before = snapshot("cut")
    assert run("--ckpt_path", "cut/checkpoints/last.ckpt", "--run_dir", "next")[0] == 0
    assert equal(last(whole), last("next"))
    assert snapshot("cut") == before


def test_a_moved_run_folder_resumes(run, whole):
    run("--run_dir", "cut", "--max_steps", "37")
    shutil.move("cut", "elsewhere")
    assert run("--resume", "elsewhere", "--max_steps", "-1", config=None)[0] == 0
    assert equal(last(whole), last("elsewhere"))


def test_init_weights_starts_a_new_run_from_weights_alone(run, whole):
    path = str(whole / "checkpoints" / "last.ckpt")
    code, _, _ = run("--init_weights", path, "--run_dir", "second", "--optimizer.lr", "0")
    assert code == 0
    assert equal(last(whole), last("second"))
    assert last("second")["global_step"] == 100


class TestWhoWins:
    """Flag > file > checkpoint > default, for the rate of learning."""

    def used(self, folder):
        saved = last(folder)["optimizer_states"][0]["param_groups"][0]["lr"]
        config = yaml.safe_load(Path(folder, "config.yaml").read_text())["optimizer"]["init_args"]["lr"]
        assert saved == config  # what the folder says is what was used
        return saved

    @pytest.fixture
    def cut(self, run):
        Path("plain.yaml").write_text(SMALL.replace("lr: 0.05, ", ""))
        assert run("--run_dir", "cut", "--max_epochs", "1", "--optimizer.lr", "0.25")[0] == 0
        return run

    def test_a_flag_beats_the_checkpoint_and_says_so(self, cut):
        code, out, _ = cut("--ckpt_path", "cut/checkpoints/last.ckpt", "--optimizer.lr", "0.001", "--run_dir", "new")
        assert code == 0
        assert "optimizer   lr 0.25 → 0.001" in out
        assert self.used("new") == 0.001

    def test_a_file_beats_the_checkpoint(self, cut):
        assert cut("--ckpt_path", "cut/checkpoints/last.ckpt", "--run_dir", "new")[0] == 0
        assert self.used("new") == 0.05

    def test_the_checkpoint_beats_a_default(self, cut):
        code, _, _ = cut("--ckpt_path", "cut/checkpoints/last.ckpt", "--run_dir", "new", config="plain.yaml")
        assert code == 0
        assert self.used("new") == 0.25

    def test_a_flag_beats_the_config_of_a_resumed_run(self, cut):
        code, out, _ = cut("--resume", "cut", "--max_epochs", "2", "--optimizer.lr", "0.001", config=None)
        assert code == 0
        assert "changed     optimizer.lr: 0.25 → 0.001" in out
        assert self.used("cut") == 0.001

    def test_nothing_typed_keeps_what_was(self, cut):
        assert cut("--resume", "cut", "--max_epochs", "2", config=None)[0] == 0
        assert self.used("cut") == 0.25

    def test_a_typed_rate_is_also_the_base_of_its_schedule(self, run):
        cosine = ("--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "200")
        run("--run_dir", "cut", "--max_epochs", "1", *cosine)
        run("--run_dir", "whole", "--optimizer.lr", "0.2", *cosine)
        assert run("--resume", "cut", "--max_epochs", "2", "--optimizer.lr", "0.2", config=None)[0] == 0
        rates = [last(f)["optimizer_states"][0]["param_groups"][0]["lr"] for f in ("whole", "cut")]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9)


REFUSED = {
    "with ckpt_path": (("--resume", "cut", "--ckpt_path", "x"), "--resume and --ckpt_path"),
    "with init_weights": (("--resume", "cut", "--init_weights", "x"), "--resume and --init_weights"),
    "auto without a folder": (("--resume", "auto"), "--resume auto needs --run_dir"),
    "another folder": (("--resume", "cut", "--run_dir", "other"), "leave --run_dir out"),
    "nothing there": (("--resume", "nowhere"), "no checkpoints/last.ckpt"),
    "not training": (("predict", "--resume", "cut"), "give --ckpt_path"),
    "both checkpoints": (("--ckpt_path", "a", "--init_weights", "b"), "leave one of them out"),
    "another effective batch": (("--resume", "cut", "--data.batch_size", "16"), "effective batch: 8 → 16"),
    "another seed": (("--resume", "cut", "--seed_everything", "7"), "seed: 0 → 7"),
    "other values": (("--resume", "cut", "--data.source.seed", "9"), "checksum of rows"),
    "another limit": (("--resume", "cut", "--limit_train_batches", "10"), "rows an epoch: 400 → 80"),
    "more rows": (("--resume", "cut", "--data.source.rows", "600"), "source rows: 500 → 600"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_and_nothing_touched(run, case):
    run("--run_dir", "cut", "--max_steps", "20")
    before = snapshot(".")
    argv, words = REFUSED[case]
    code, _, err = run(*argv, "--max_steps", "40", config=None)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) <= 6
    assert snapshot(".") == before


STOPPING = "[{class_path: EarlyStopping, init_args: {monitor: val/loss, patience: 1, min_delta: 10.0}}]"


def test_a_run_that_stopped_early_is_complete_until_a_setting_changes(run):
    run("--run_dir", "early", "--trainer.callbacks", STOPPING, "--max_epochs", "5")
    steps = last("early")["global_step"]
    assert steps == 100
    code, out, _ = run("--resume", "early", config=None)
    assert code == 0
    assert "complete" in out


def test_early_stopping_goes_on_from_the_end_of_an_epoch(run):
    patient = STOPPING.replace("patience: 1", "patience: 9")
    run("--run_dir", "cut", "--trainer.callbacks", patient, "--max_epochs", "1")
    assert run("--resume", "cut", "--max_epochs", "2", config=None)[0] == 0
    assert last("cut")["global_step"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("--max_epochs", "2"), ("--max_steps", "60")])
def test_a_plateau_schedule_resumes_exactly(run, stop):
    plateau = ("--lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau", "--lr_scheduler.patience", "0")
    plateau += ("--lr_scheduler.threshold", "0.5")
    run("--run_dir", "whole", *plateau, "--max_epochs", "4")
    run("--run_dir", "cut", *plateau, *stop)
    assert run("--resume", "cut", "--max_epochs", "4", "--max_steps", "-1", config=None)[0] == 0
    rates = [last(f)["optimizer_states"][0]["param_groups"][0]["lr"] for f in ("whole", "cut")]
    assert rates[0] == rates[1] < 0.05
    assert equal(last("whole"), last("cut"))


def test_a_resume_that_cannot_be_exact_can_be_forced(run):
    run("--run_dir", "cut", "--max_steps", "20")
    forced = ("--resume", "cut", "--data.batch_size", "16", "--max_steps", "40", "--resume_changed", "true")
    assert run(*forced, config=None)[0] == 0
    assert last("cut")["global_step"] == 40


def test_weights_of_another_model_are_refused_naming_the_config(run):
    run("--run_dir", "first", "--max_steps", "20")
    Path("other.yaml").write_text(
        SMALL.replace("LinearModel, init_args: {out_features: 1}", "LinearModel, init_args: {out_features: 2}")
    )
    for argv in (("predict", "--ckpt_path"), ("--init_weights",)):
        code, _, err = run(*argv, "first/checkpoints/last.ckpt", config="other.yaml")
        assert code == 2
        assert "net.linear.weight is [1, 3], not [2, 3]" in err
        assert "--config first/config.yaml" in err


@pytest.mark.parametrize("stop", ["37", "50"])
def test_an_average_of_weights_goes_on_too(run, stop):
    """At the end of training Lightning puts the average in the place of the weights: what is saved must be both."""
    average = ["--callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging", "--max_steps"]
    assert run("--run_dir", "whole", *average, "75")[0] == run("--run_dir", "part", *average, stop)[0] == 0
    assert run("--resume", "part", "--max_steps", "75", config=None)[0] == 0
    a, b = (torch.load(f"{d}/checkpoints/last.ckpt", weights_only=True) for d in ("whole", "part"))
    for state in ("state_dict", "current_model_state"):
        assert a[state].keys() == b[state].keys()
        assert all(torch.equal(value, b[state][name]) for name, value in a[state].items()), state
