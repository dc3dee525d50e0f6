"""A net in shards (``--strategy model_parallel``): trained, stopped, resumed, and opened again on one process."""

import shutil

import numpy as np
import pytest
import torch

from project.engine.checkpoint import Checkpoints
from project.engine.nonfinite import NonFinite, NotFinite
from project.engine.sharding import Sharded, own_shard
from project.engine.watch import Stopped
from project.models.deep import Deep
from project.module import Module
from tests.numbered import COLUMNS, Numbered, fit
from tests.ranks import on_ranks
from tests.scaling.jobs import SMALL, TORCHRUN, apart, command, rank_of_command

NET = ["--model.net", "project.models.deep.Deep", "--model.net.width", "8", "--model.net.depth", "2"]
SHARDED = [*SMALL, *NET, "--strategy", "model_parallel"]
ALONE = ["--strategy", "auto", "--devices", "1", "--data.batch_size", "16"]  # the same 16 rows a step


class Breaks(Deep):
    """Gets a gradient that is not finite in one weight, which one of the ranks holds: at the third step."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, width=8, depth=1)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == 3:
                bad = torch.zeros(8, 1)
                bad[7] = float("nan")
                x = x + 0 * x  # a tensor of its own
                out = self.hidden[0](x)
                out.register_hook(lambda g: g + bad.T)
                return self.out(out)
        return super().forward(x)


def training(folder):
    """On a rank: what a sharded net learns, then one that breaks."""
    module = Module(Deep(COLUMNS, width=8, depth=1))
    fit(Numbered(40), module, 2, data={"batch_size": 4}, strategy=Sharded(2))
    held = sum(own_shard(p).numel() for p in module.parameters())
    learnt = torch.cat([p.full_tensor().flatten() for p in module.net.parameters()]).detach()
    checkpoints = Checkpoints(every_n_train_steps=1)
    checkpoints.dirpath = folder
    module, words = Module(Breaks()), ""
    try:
        parts = (NonFinite(), checkpoints)
        fit(Numbered(40), module, 2, parts, {"batch_size": 4}, strategy=Sharded(2), enable_checkpointing=True)
    except (NotFinite, Stopped) as stop:
        words = str(stop)
    finite = all(torch.isfinite(own_shard(p)).all() for p in module.parameters())
    return held, learnt, words, finite


def test_each_rank_holds_a_part_and_a_bad_gradient_in_one_shard_stops_all(tmp_path):
    (held, learnt, words, finite), (held_1, _, words_1, finite_1) = on_ranks(2, training, tmp_path)
    _, alone, _ = fit(Numbered(40), Module(Deep(COLUMNS, width=8, depth=1)), data={"batch_size": 8})
    expected = torch.cat([p.flatten() for p in alone.net.parameters()]).detach()
    assert held + held_1 == len(expected)
    assert 0 < held_1 < len(expected)
    assert torch.allclose(learnt, expected, atol=1e-6)
    assert "at optimizer step 3" in words
    assert words_1 == "1"  # rank 0 tells
    assert finite
    assert finite_1
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.slow
def test_stopped_resumed_and_opened_on_one_process(here, run, capfd):
    """The end is the same to the bit on the same processes, and to rounding on one."""
    lines = [
        [*SHARDED, "--run_dir", "whole"],
        [*SHARDED, "--run_dir", "cut", "--max_steps", "7"],
    ]
    assert on_ranks(2, rank_of_command, lines) == [[0, 0], [0, 0]]
    assert "16 effective = 8 rows x 2 devices x 1 accumulated" in capfd.readouterr().out
    shutil.copytree("cut", "cut-1")
    assert on_ranks(2, rank_of_command, [["--resume", "cut", "--max_steps", "-1"]]) == [[0], [0]]
    assert apart("whole", "cut") == 0
    assert run("--resume", "cut-1", "--max_steps", "-1", *ALONE).code == 0
    assert apart("whole", "cut-1") < 1e-5
    on_one = run("test", *SMALL, *NET, "--ckpt_path", "whole/checkpoints/last.ckpt")
    assert on_one.code == 0
    assert run("--run_dir", "alone", *SMALL, *NET, *ALONE).code == 0
    assert apart("whole", "alone") < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer SGD",  # keeps no state, over which Lightning's own loading stumbles
        "--accumulate_grad_batches 2 --data.batch_size 4 --gradient_clip_val 0.1",
        "--precision bf16-mixed",
        "--precision bf16-true",
    ],
)
def test_flags_work_on_shards(here, flags):
    line = [*SHARDED, *flags.split()]
    lines = [[*line, "--run_dir", "whole"], [*line, "--run_dir", "cut", "--max_steps", "7"]]
    lines += [["--resume", "cut", "--max_steps", "-1"]]
    assert on_ranks(2, rank_of_command, lines, timeout=200) == [[0, 0, 0]] * 2
    assert apart("whole", "cut") == 0


@pytest.mark.slow
def test_evaluation_and_prediction_on_shards(here, run):
    path = ["--ckpt_path", "whole/checkpoints/last.ckpt"]
    lines = [[*SHARDED, "--run_dir", "whole"], ["predict", *SHARDED, *path, "--output", "two.npy"]]
    assert on_ranks(2, rank_of_command, [*lines, ["test", *SHARDED, *path]], timeout=200) == [[0, 0, 0]] * 2
    assert run("predict", *SMALL, *NET, *path, "--output", "one.npy").code == 0
    one, two = (torch.from_numpy(np.load(f"{name}.npy")) for name in ("one", "two"))
    assert len(one) == 200
    assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.slow
def test_by_torchrun_and_by_lightnings_own_launcher(here):
    """Real processes, as a user starts them."""
    by_torchrun = [*TORCHRUN, "--nproc_per_node=2"]
    command(*SHARDED, "--run_dir", "one", cwd=here, launcher=by_torchrun)
    command(*SHARDED, "--run_dir", "two", "--devices", "2", cwd=here)
    assert apart("one", "two") == 0


def test_a_net_that_says_not_how_is_refused(refused, small):
    said = refused(*small, "--strategy", "model_parallel")
    assert "LinearModel has no method shard(mesh)" in said
    assert "--strategy ddp" in said


def test_a_mesh_whose_processes_need_the_same_rows_is_refused(refused, small):
    said = refused(*small, *NET, "--strategy", '{"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}')
    assert "--strategy model_parallel" in said
