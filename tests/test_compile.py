"""``--model.compile true``: the net is compiled in place, so that checkpoints fit with and without it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from project.cli import main
from project.models import LinearModel
from project.module import Module

STEPS = ["--accelerator", "cpu", "--limit_val_batches", "2", "--limit_test_batches", "0", "--model.metrics", "null"]


def weights(folder: str) -> dict[str, Tensor]:
    saved: dict[str, Tensor] = torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return saved


def interrupted(first: str, then: str) -> None:
    """A run of eight steps, stopped after four, each part with its own setting of ``compile``."""
    main([*STEPS, "--model.compile", first, "--max_steps", "4", "--run_dir", f"{first}-{then}"])
    main(["--resume", f"{first}-{then}", "--model.compile", then, "--max_steps", "8"])


def compare(*settings: tuple[str, str]) -> None:
    main([*STEPS, "--max_steps", "8", "--run_dir", "never"])
    expected = weights("never")
    assert [*expected] == ["net.linear.weight", "net.linear.bias"]
    for first, then in settings:
        interrupted(first, then)
        found = weights(f"{first}-{then}")
        assert [*found] == [*expected]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The nets that were compiled, by the backend that only looks: building kernels takes a minute."""
    seen: list[nn.Module] = []

    def look(net: nn.Module) -> None:
        seen.append(net)
        nn.Module.compile(net, backend="eager")

    monkeypatch.setattr(LinearModel, "compile", look)
    return seen


def test_a_run_resumes_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[nn.Module]):
    monkeypatch.chdir(tmp_path)
    compare(("true", "false"))
    assert len(compiled) == 1


@pytest.mark.slow
def test_a_run_resumes_with_and_without_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compare(("true", "false"), ("false", "true"), ("true", "true"))


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as stopped:
        main([*STEPS, "--max_steps", "1", "--run_dir", "one", "--model.compile", "true"])
    assert stopped.value.code == 2
    assert "there is no no-such-compiler" in capsys.readouterr().err
    assert not Path("one").exists()
    assert not Module(LinearModel(2, 1)).compiled
