"""Every argument of Lightning's Trainer is a bare flag: it works, or it is refused in words."""

import inspect
import re

import lightning as L
import pytest

# `--strategy ddp` is run by test_run_folder.py, in processes of its own: what gloo starts does not survive a fork.
# A command line, and a pattern of what must be seen on the screen or among the files of the run folder.
ONE_EPOCH = "trained     20 optimizer steps; 160 rows used"
TOGETHER = (  # what changes nothing on the screen, in two runs instead of twenty
    "--accelerator cpu --devices auto --num_nodes 1 --logger true --max_time 00:00:10:00 --limit_predict_batches 1 "
    "--num_sanity_val_steps -1 --enable_progress_bar false --gradient_clip_val 0.1 --deterministic true "
    "--sync_batchnorm true --callbacks EarlyStopping --callbacks.monitor val/loss --enable_autolog_hparams false",
    "--precision 64-true --gradient_clip_algorithm value --gradient_clip_val 0.1 --benchmark true "
    "--detect_anomaly true --inference_mode false --use_distributed_sampler false --reload_dataloaders_every_n_epochs 1"
    " --model_registry a/b",
)
WORKS = [
    *((line, ONE_EPOCH) for line in TOGETHER),
    ("--min_steps 25 --max_epochs 2", "trained     40 optimizer steps"),
    ("--val_check_interval 0.5", "step 10  val/"),
    ("--precision bf16-mixed", ONE_EPOCH),
    ("--logger CSVLogger --logger.save_dir csv", ONE_EPOCH),
    ("--callbacks TQDMProgressBar", ONE_EPOCH),
    ("--callbacks ModelCheckpoint", "checkpoints/epoch=0-step=20.ckpt"),
    ("--fast_dev_run 2", "trained     2 optimizer steps"),
    ("--min_epochs 2 --max_steps 1", "trained     1 optimizer step"),
    ("--max_steps 5", "trained     5 optimizer steps; 40 rows used"),
    ("--limit_train_batches 3", "trained     3 optimizer steps"),
    ("--limit_train_batches 0.5", "trained     10 optimizer steps"),
    ("--limit_val_batches 0", "last.ckpt, the last"),
    ("--limit_test_batches 0", "tested      nothing"),
    ("--overfit_batches 2", "trained     2 optimizer steps"),
    ("--val_check_interval 5", "step 15  val/"),
    ("--check_val_every_n_epoch 2", "last.ckpt, the last"),
    ("--log_every_n_steps 1", r"\n3,"),  # a row of metrics.csv for each step
    ("--enable_checkpointing false", "the weights in memory"),
    ("--enable_model_summary true", "Total params"),
    ("--accumulate_grad_batches 4", "32 effective = 8 rows x 1 device x 4 accumulated"),
    ("--profiler simple", "fit-profile.txt"),
    ("--barebones true", "trained     20 optimizer steps"),
    ("--plugins AsyncCheckpointIO", "checkpoints/last.ckpt"),
]
REFUSED = [
    ("--accelerator quantum", "invalid accelerator name"),
    ("--accelerator gpu", "--accelerator cpu"),
    ("--strategy magic", "invalid strategy name"),
    ("--strategy ddp_spawn --devices 2", "What works here: --strategy ddp"),
    ("--strategy fsdp", "runs on GPUs only"),
    ("--num_nodes 2", "torchrun"),
    ("--precision 16.5", "bf16-mixed"),
    ("--default_root_dir here", "--run_dir"),
    ("--fast_dev_run maybe", "expected int or bool"),
    ("--max_time tomorrow", "DD:HH:MM:SS"),
    ("--max_epochs -2", "max_epochs"),
    ("--limit_val_batches 1.5", "limit_val_batches"),
    ("--val_check_interval 1000", "number of the training batches"),
    ("--accumulate_grad_batches 0", "at least 1"),
    ("--gradient_clip_algorithm magic --gradient_clip_val 1", "gradient_clip_algorithm"),
    ("--profiler psychic", "profiler"),
    ("--barebones true --logger true", "barebones"),
    ("--enable_checkpointing false --callbacks ModelCheckpoint", "enable_checkpointing"),
    ("--enable_progress_bar false --callbacks TQDMProgressBar", "enable_progress_bar"),
]


def test_no_argument_is_left_out():
    arguments = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    assert arguments == {flag for line, _ in WORKS + REFUSED for flag in re.findall(r"--(\w+)(?![\w.])", line)}


@pytest.mark.parametrize(("line", "expected"), WORKS)
def test_works(run, small, here, caplog, line, expected):
    done = run(*small, *line.split())
    assert done.code == 0, done.err
    files = "\n".join(str(p) for p in done.folder.rglob("*"))
    rows = (done.folder / "metrics.csv").read_text() if "metrics.csv" in files else ""
    assert re.search(expected, done.out + caplog.text + files + rows)
    assert {p.name for p in here.iterdir()} <= {"configs", "runs", "csv"}
    assert (done.folder / "config.yaml").exists()


@pytest.mark.parametrize(("line", "expected"), REFUSED)
def test_refused(refused, small, line, expected):
    assert expected in refused(*small, *line.split())


def test_the_long_name_is_the_same_flag(run, small):
    assert "trained     5 optimizer steps" in run(*small, "--trainer.max_steps=5").out
