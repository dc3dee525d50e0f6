"""Mistakes end in one to five lines that name the key, where it stands, what was expected and the nearest valid name.

The fixture ``refused`` also checks the exit code, 2, and that nothing was made: no folder, no file.
"""

import pytest
import torch
import yaml

from project.cli import main

NEEDS = """
from torch import nn
class Needs(nn.Module):
    def __init__(self, in_features: int, hidden: int):
        super().__init__()
"""


@pytest.fixture
def in_file(here, refused):
    """Refused with this YAML on top of the default experiment."""

    def in_file(text, *flags):
        (here / "mine.yaml").write_text(text)
        return refused("--config", "configs/linear.yaml", "--config", "mine.yaml", *flags)

    return in_file


# A flag with a mistake in it, and what it must have been. The same in a file: key: value under their sections.
TYPOS = [
    ("--max_epoch 3", "--max_epochs"),
    ("--trainer.max_epoch 3", "--max_epochs"),
    ("--learning_rat 0.1", "--optimizer.lr"),
    ("--lr 0.1", "--optimizer.lr"),
    ("--epochs 3", "--max_epochs"),
    ("--seed 3", "--seed_everything"),
    ("--output_dir x", "--run_dir"),
    ("--batch_size 3", "--data.batch_size"),
    ("--data.max_epochs 3", "--max_epochs"),
    ("--model.nett x", "--model.net"),
    ("--model.net.out_feature 2", "--model.net.out_features"),
    ("--data.batch 4", "--data.batch_size"),  # shortened
    ("--data.batchsize=4", "--data.batch_size"),
    ("--data.source.row 3", "--data.source.rows"),
    ("--optimizer.lrr 1", "--optimizer.lr"),
    ("--optimizer Adam --optimizer.beta 1", "--optimizer.betas"),
    ("--lr_scheduler StepLR --lr_scheduler.step 3", "--lr_scheduler.step_size"),
    ("--checkpoint.monitr x", "--checkpoint.monitor"),
    ("--callbacks+=EarlyStopping --callbacks.patienc=3", "--callbacks.patience"),
]


@pytest.mark.parametrize(("line", "meant"), TYPOS)
def test_a_mistyped_flag(refused, line, meant):
    wrong = line.split(" --")[-1].lstrip("-").split("=")[0].split()[0].removeprefix("trainer.")
    err = refused(*line.split())
    assert f"--{wrong}: no such setting; did you mean {meant}?" in err.replace("--trainer.", "--")


@pytest.mark.parametrize(
    ("text", "wrong", "meant"),
    [
        ("trainer: {max_epoch: 3}", "trainer.max_epoch", "trainer.max_epochs"),
        ("trainr: {max_epochs: 3}", "trainr.max_epochs", "trainer.max_epochs"),
        ("max_epochs: 3", "max_epochs", "trainer.max_epochs"),
        ("trainer: {trainer: {max_epochs: 3}}", "trainer.trainer.max_epochs", "trainer.max_epochs"),
        ("fit: {trainer: {max_epochs: 3}}", "fit.trainer.max_epochs", "trainer.max_epochs"),
        ("trainer: {batch_size: 3}", "trainer.batch_size", "data.batch_size"),
        ("model: {nett: x}", "model.nett", "model.net"),
        ("model: {class_path: project.module.Module, init_args: {nett: x}}", "model.nett", "model.net"),
        ("model: {net: {init_args: {out_featurs: 2}}}", "model.net.out_featurs", "model.net.out_features"),
        ("data: {batchsize: 3}", "data.batchsize", "data.batch_size"),
        ("data: {source: {init_args: {row: 3}}}", "data.source.row", "data.source.rows"),
        ("data: {source: {row: 3}}", "data.source.row", "data.source.rows"),
        ("optimizer: {lrr: 0.3}", "optimizer.lrr", "optimizer.lr"),
        ("lr: 0.3", "lr", "optimizer.lr"),
        ("checkpoint: {monitr: x}", "checkpoint.monitr", "checkpoint.monitor"),
        (
            "trainer: {callbacks: [{class_path: ModelSummary}, {class_path: EarlyStopping, init_args: {patienc: 3}}]}",
            "trainer.callbacks.1.patienc",
            "trainer.callbacks.1.patience",
        ),
    ],
)
def test_a_mistyped_or_misplaced_key(in_file, text, wrong, meant):
    assert f"{wrong} in mine.yaml: no such setting; did you mean {meant}?" in in_file(text)


def test_a_key_one_level_too_deep(in_file):
    text = "model: {net: {init_args: {init_args: {out_features: 2}}}}"
    assert "model.net.out_features in mine.yaml: stands one init_args too deep." in in_file(text)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.max_epochs", "x", "int"),
        ("trainer.max_steps", "1e3", "int"),
        ("trainer.detect_anomaly", "perhaps", "bool"),
        ("trainer.precision", "17-mixed", "'16-mixed'"),
        ("data.batch_size", "32.0", "int"),
        ("data.batch_size", "[1]", "int"),
        ("data.shuffle", "maybe", "bool"),
        ("data.split", "[1, 2]", "tuple with 3 elements"),
        ("data.source.rows", "many", "int"),
        ("data.source.kind", "lin", "one of 'linear', 'binary'"),
        ("optimizer.lr", "abc", "float"),
        ("checkpoint.mode", "mim", "one of 'min', 'max'"),
        ("seed_everything", "x", "bool or int"),
    ],
)
def test_a_value_of_the_wrong_type(refused, in_file, key, value, expected):
    flag = key.removeprefix("trainer.")
    err = refused(f"--{flag}", value)
    assert f"--{flag} {value}: expected" in err
    assert expected in err
    text = value
    for name in reversed(key.split(".")):
        text = f"{{{name}: {text}}}"
    err = in_file(text)
    assert f"{key}: {value} in mine.yaml: expected" in err
    assert expected in err


@pytest.mark.parametrize("spelling", ["1e-3", "1E-3", ".001", '"0.001"', "1_000e-6"])
def test_every_spelling_of_a_number_is_that_number(here, run, spelling):
    """In a file and as a flag; the rate that the optimizer used is in the checkpoint."""
    (here / "mine.yaml").write_text(f"optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: {spelling}}}}}")
    for i, typed in enumerate((["--config", "mine.yaml"], [f"--optimizer.lr={spelling.strip(chr(34))}"])):
        run("--config", "configs/linear.yaml", *typed, "--max_steps", "1", "--run_dir", f"out{i}")
        checkpoint = torch.load(here / f"out{i}" / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 0.001


@pytest.mark.parametrize(("spelling", "value"), [("yes", True), ("on", True), ('"true"', True), ("off", False)])
def test_every_spelling_of_yes_and_no(here, capsys, spelling, value):
    (here / "mine.yaml").write_text(f"data: {{shuffle: {spelling}}}")
    files = ["--config", "configs/linear.yaml", "--config", "mine.yaml"]
    for typed in (files, [f"--data.shuffle={spelling.strip(chr(34))}"]):
        with pytest.raises(SystemExit):
            main([*typed, "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["shuffle"] is value


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--model.net project.models.LinearModl",
            "no attribute 'LinearModl'; did you mean project.models.LinearModel?",
        ),
        ("--model.net project.modelz.X", "module 'project' has no attribute 'modelz'"),
        ("--model.net nowhere.X", "--model.net nowhere.X: No module named 'nowhere'"),
        ("--model.net collections.OrderedDict", "--model.net collections.OrderedDict: expected a class of Module"),
        ("--data.source project.models.LinearModel", "expected a class of Source"),
        ("--model project.models.LinearModel", "expected a class of LightningModule"),
        ("--optimizer Adamm", "--optimizer Adamm: no such class; did you mean Adam?"),
        ("--callbacks EarlyStoping", "--callbacks EarlyStoping: no such class; did you mean EarlyStopping?"),
        ("--model.net needs.Needs", "--model.net needs.Needs: also needs --model.net.hidden"),
        (
            "--model.metrics.a torchmetrics.Accuracy",
            "--model.metrics.a torchmetrics.Accuracy: also needs --model.metrics.a.task",
        ),
        ("--lr_scheduler StepLR", "--lr_scheduler StepLR: also needs --lr_scheduler.step_size"),
        ("--logger TensorBoardLogger", "also needs --logger.save_dir"),
        ("--model.net slip.X", "invalid syntax (slip.py, line 1)"),
        ("--model.net broken.X", "cannot be imported: NameError: name 'undefined' is not defined"),
        ("--optimizer.help Adamm", "--optimizer.help Adamm: no such class"),
    ],
)
def test_a_wrong_class(refused, here, line, expected):
    for name, code in (("needs", NEEDS), ("slip", "def x(:\n"), ("broken", "undefined\n")):
        (here / f"{name}.py").write_text(code)
    assert expected in refused(*line.split())


def test_a_class_in_a_file_that_lacks_a_setting(in_file):
    text = "model: {metrics: {a: torchmetrics.Accuracy}}"
    assert "model.metrics.a: torchmetrics.Accuracy in mine.yaml: also needs init_args: {task: …}" in in_file(text)


def test_a_setting_of_another_class_names_those_of_the_chosen_one(refused):
    assert "--model.net.hidden: no such setting; model.net has in_features, out_features." in refused(
        "--model.net.hidden", "3"
    )
    assert "--optimizer.momentum: no such setting; optimizer has amsgrad, betas," in refused(
        "--optimizer", "Adam", "--optimizer.momentum", "0.9"
    )


def test_a_wrong_class_in_a_file(in_file):
    text = "optimizer: {class_path: torch.optim.SDG, init_args: {lr: 0.1}}"
    assert "optimizer.class_path: torch.optim.SDG in mine.yaml" in (err := in_file(text))
    assert "did you mean torch.optim.SGD?" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found nothing"),
        ("- 3", "found a list"),
        ("a: [", "not a YAML file, line 1, column 5"),
        ("trainer:\n  max_epochs: 3\n max_steps: 3\n", "not a YAML file, line 3, column 2: expected"),
        ("trainer:", "trainer in mine.yaml: expected settings by name under it; found nothing"),
        ("trainer: 3", "found 3"),
    ],
)
def test_a_config_that_is_none(in_file, text, expected):
    assert expected in in_file(text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--config configs/linea.yaml",
            "--config configs/linea.yaml: No such file or directory; did you mean configs/",
        ),
        ("--config configs", "--config configs: Is a directory"),
        ("--config", "expected the name of a YAML file"),
        ("fti", "fti: no such command; did you mean fit?"),
        ("--max_steps 3 predict", "predict: expected a flag"),
        ("--max_steps", "--max_steps: expected a value"),
        ("predict", "predict needs --ckpt_path"),
        ("test --ckpt_path nowhere.ckpt", "--ckpt_path nowhere.ckpt: no such file"),
        (
            "--checkpoint.monitor val_loss",
            "--checkpoint.monitor: nothing called val_loss to monitor; did you mean val/loss",
        ),
        ("--callbacks EarlyStopping --callbacks.monitor val_r2", "EarlyStopping: nothing called val_r2"),
        ("--output x.csv", "only predict writes such a file"),
        ("--optimizer.lr=-1", "--optimizer, --lr_scheduler: Invalid learning rate: -1.0"),
        ("--data.source.rows=20", "--data.drop_last false"),
        ("--data.source.rows=-3", "--data.source.rows"),
        ("--data.batch_size 0", "--data.batch_size 0: expected a whole number of at least 1"),
    ],
)
def test_a_command_that_cannot_work(refused, line, expected):
    assert expected in refused(*line.split())


def test_the_size_of_the_input_stands_in_one_place(refused, run, small):
    """It follows from the data. Only a size that was typed, or a net of a fixed size, can contradict it."""
    assert run(*small, "--data.source.features", "7").code == 0
    err = refused("--model.net.in_features", "7")
    assert "in_features 7" in err
    assert "10 input columns" in err
    err = refused("--config", "configs/generate.yaml", "--data.source.features", "7")
    assert "7 input columns" in err
    assert "takes 5" in err
