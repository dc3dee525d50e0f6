"""Completion in bash: the script is loaded by a real bash, which is asked what it would offer."""

import subprocess

import pytest

from project.tools.completion import script


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "train.bash"
    file.write_text(script([]))

    def offered(*words):
        typed = " ".join(f"'{word}'" for word in words)
        code = f"source {file}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _train_py; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return offered


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "train.py", "--max_ep"], ["--max_epochs"]),
        (["train.py", "--accum"], ["--accumulate_grad_batches"]),
        (["python", "train.py", "fit", "--trainer.max_ep"], ["--trainer.max_epochs"]),
        (["python3", "code/train.py", "--data.batch"], ["--data.batch_size"]),
        (["python", "train.py", "--run"], ["--run_dir"]),
        (["python", "train.py", "pred"], ["predict"]),
        (["python", "other.py", "--max_ep"], []),
    ],
)
@pytest.mark.slow
def test_what_a_press_of_tab_offers(bash, words, expected):
    assert bash(*words) == expected
