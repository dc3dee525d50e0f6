"""--val_every_n_steps: validation in optimizer steps, whatever the accumulation and across epochs."""

import re

import pytest


@pytest.mark.parametrize("accumulate", [1, 4])
def test_validations_come_every_n_optimizer_steps(run, small, accumulate):
    flags = [*small[:3], "8" if accumulate == 1 else "2", "--max_epochs", "2"]  # 20 steps an epoch
    done = run(*flags, "--accumulate_grad_batches", accumulate, "--val_every_n_steps", "7")
    assert done.code == 0
    steps = [int(step) for step in re.findall(r"^step ([\d,]+)  val/loss", done.out, re.M)]
    assert steps == [7, 14, 21, 28, 35]


def test_two_ways_to_say_it_are_refused(refused):
    assert "--val_every_n_steps and --val_check_interval" in refused(
        "--val_every_n_steps", 5, "--val_check_interval", 0.5
    )


def test_it_must_be_a_whole_number_of_at_least_one(refused):
    assert "--val_every_n_steps" in refused("--val_every_n_steps", 0)


def test_a_saved_config_reruns_with_another_accumulation(run, small):
    first = run(*small, "--val_every_n_steps", "7")
    again = run("--config", first.folder / "config.yaml", "--accumulate_grad_batches", 2, "--data.batch_size", 4)
    assert again.code == 0, again.err
    assert again.score.keys() == first.score.keys()
