"""The rows used, dropped and scored are said after each phase."""


def test_after_training_and_its_test(run, small):
    done = run(*small, "--data.batch_size", "32")  # 160 training rows, 20 of validation, 20 of test
    assert "160 rows used; an epoch has all 160 rows" in done.out
    assert "20 rows" in next(line for line in done.out.splitlines() if line.startswith("tested"))
    done = run(*small, "--data.batch_size", "50")
    assert "150 rows used; an epoch has 150 of 160 rows: 10 dropped (an incomplete effective batch)" in done.out


def test_rows_beyond_a_limit_are_not_called_dropped(run, small):
    done = run(*small, "--limit_train_batches", "5")
    assert "an epoch has 40 of 160 rows: 120 beyond the limit" in done.out


def test_after_validation_and_test(run, small):
    first = run(*small)
    last = first.folder / "checkpoints" / "last.ckpt"
    for command in ("validate", "test"):
        done = run(command, *small[:2], "--ckpt_path", last)
        assert f"{command:<12}done; 20 rows" in done.out


def test_training_without_validation_says_nothing_of_empty_lists(run, small, recwarn):
    done = run(*small, "--data.split", "[1,0,0]", "--checkpoint.monitor", "train/loss")
    assert done.code == 0, done.err
    assert not [w for w in recwarn if "across ranks is zero" in str(w.message)]
