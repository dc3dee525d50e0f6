"""Ctrl-C and the schedulers' signals: the step is finished and saved, every process ends, and resuming is exact."""

import pytest
import torch

CODE = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}
SHAPES = {
    "1 process": {},
    "1 process, 2 workers": {"argv": ("--data.num_workers", "2", "--data.chunk_size", "16")},
    "accumulation": {"argv": ("--accumulate_grad_batches", "3")},
    "2 processes": {"ranks": 2},
    "2 of torchrun": {"ranks": 2, "torchrun": True},
}


def start(job, shape="1 process", *argv, **options):
    settings = {**SHAPES[shape], **options}
    return job(*settings.pop("argv", ()), *argv, **settings)


def codes(one, name):
    """Rank 0 speaks for processes that it has launched itself; under torchrun each tells torchrun."""
    return [CODE[name]] * (one.ranks if len(one.pids) > 1 else 1)


def equal_weights(first, second):
    a, b = first["state_dict"], second["state_dict"]
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_training_and_resumed(job, table, shape, name):
    stopped = start(job, shape).when("train", 5).signal(name).end()
    assert stopped.codes == codes(stopped, name), stopped.screen
    assert stopped.seconds < 10
    assert "Traceback" not in stopped.screen
    step = stopped.checkpoint()["global_step"]
    assert f"after optimizer step {step}; saved run/checkpoints/last.ckpt" in stopped.screen
    assert stopped.screen.count("--resume run") == 1
    assert "tested" not in stopped.screen
    resumed = start(job, shape, "--resume", "run", sleep=0).end()
    assert set(resumed.codes) == {0}, resumed.screen
    whole = start(job, shape, "--run_dir", "whole", sleep=0).end()
    last = torch.load(whole.folder / "whole/checkpoints/last.ckpt", weights_only=True)
    assert equal_weights(resumed.checkpoint(), last)
    assert resumed.checkpoint()["global_step"] == last["global_step"]
    table(f"{name} in training, {shape}", f"exit {stopped.codes[0]}, resumed exactly", stopped.seconds)
