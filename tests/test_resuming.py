"""Going on from the command line: --resume, --resume auto, --ckpt_path, --init_weights, and who wins."""

import csv
import json
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from project.cli import main

SMALL = """
model:
  net: {class_path: project.models.LinearModel, init_args: {out_features: 1}}
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


def test_resume_goes_on_in_the_same_folder_as_if_never_stopped(run):
    assert run("--run_dir", "whole")[0] == 0
    assert run("--run_dir", "cut", "--max_steps", "37")[0] == 0
    code, out, _ = run("--resume", "cut", "--max_steps", "-1", config=None)
    assert code == 0
    assert "resume      cut/checkpoints/last.ckpt, after optimizer step 37" in out
    assert "changed     trainer.max_steps: 37 → -1" in out
    assert equal(last("whole"), last("cut"))
    kept = {r["step"]: r for r in rows("cut")}
    for row in rows("whole"):
        values = {n: v for n, v in row.items() if n not in ("rows_per_s", "steps_per_s", "memory_mb")}
        assert {n: kept[row["step"]].get(n) for n in values} == values
    steps = [int(r["step"]) for r in rows("cut")]
    assert steps == sorted(set(steps))
    assert Path("cut/config-until-step-37.yaml").exists()


def test_a_complete_run_says_so_and_touches_nothing(run):
    run("--run_dir", "done")
    before = snapshot("done")
    code, out, _ = run("--resume", "done", config=None)
    assert code == 0
    assert "complete    done/checkpoints/last.ckpt" in out
    assert snapshot("done") == before


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


def test_ckpt_path_goes_on_in_a_new_folder_and_leaves_the_old_one(run):
    run("--run_dir", "whole")
    run("--run_dir", "cut", "--max_steps", "37")
    before = snapshot("cut")
    assert run("--ckpt_path", "cut/checkpoints/last.ckpt", "--run_dir", "next")[0] == 0
    assert equal(last("whole"), last("next"))
    assert snapshot("cut") == before


def test_a_moved_run_folder_resumes(run):
    run("--run_dir", "whole")
    run("--run_dir", "cut", "--max_steps", "37")
    shutil.move("cut", "elsewhere")
    assert run("--resume", "elsewhere", "--max_steps", "-1", config=None)[0] == 0
    assert equal(last("whole"), last("elsewhere"))


def test_init_weights_starts_a_new_run_from_weights_alone(run):
    run("--run_dir", "first")
    code, _, _ = run("--init_weights", "first/checkpoints/last.ckpt", "--run_dir", "second", "--optimizer.lr", "0")
    assert code == 0
    assert equal(last("first"), last("second"))
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
