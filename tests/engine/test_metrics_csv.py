"""metrics.csv: nothing lost, nothing doubled, steps that rise."""

import csv

from project.engine.metrics_csv import MetricsCSV


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_values_of_one_step_share_a_row(tmp_path):
    log = MetricsCSV(tmp_path)
    log.log_metrics({"train/loss": 2.0}, step=50)
    log.log_metrics({"val/loss": 3.0}, step=50)
    log.log_metrics({"train/loss": 1.0}, step=100)
    log.finalize("success")
    assert read(tmp_path) == [
        {"step": "50", "train/loss": "2.0", "val/loss": "3.0"},
        {"step": "100", "train/loss": "1.0", "val/loss": ""},
    ]


def test_a_late_column_leaves_old_rows_as_they_are(tmp_path):
    log = MetricsCSV(tmp_path)
    for step in range(3):
        log.log_metrics({"a": step}, step=step)
        log.save()
    log.log_metrics({"a": 3, "late": 9}, step=3)
    log.finalize("success")
    rows = read(tmp_path)
    assert [r["step"] for r in rows] == ["0", "1", "2", "3"]
    assert [r["late"] for r in rows] == ["", "", "", "9"]
    assert (tmp_path / "metrics.csv").read_text().count("step") == 1


def test_a_resumed_run_continues_and_drops_what_the_dead_attempt_wrote_after_its_checkpoint(tmp_path):
    log = MetricsCSV(tmp_path)
    for step in (10, 20, 30, 40):
        log.log_metrics({"loss": step / 10}, step=step)
    log.finalize("failed")
    again = MetricsCSV(tmp_path)
    again.rewind(20)
    again.log_metrics({"loss": 7.0, "new": 1.0}, step=30)
    again.finalize("success")
    assert [(r["step"], r["loss"], r["new"]) for r in read(tmp_path)] == [
        ("10", "1.0", ""),
        ("20", "2.0", ""),
        ("30", "7.0", "1.0"),
    ]


def test_a_row_goes_back_to_what_it_was_when_the_checkpoint_was_saved_but_for_the_test_scores(tmp_path):
    log = MetricsCSV(tmp_path)
    log.log_metrics({"loss": 1.0}, step=10)
    log.log_metrics({"loss": 2.0, "val": 3.0, "test/r2": 0.5}, step=17)
    log.finalize("success")
    again = MetricsCSV(tmp_path)
    again.rewind(17, {"val": 3.0})
    again.finalize("success")
    assert [list(r.values()) for r in read(tmp_path)] == [["10", "1.0", "", ""], ["17", "", "3.0", "0.5"]]
    again.rewind(10, {})
    again.finalize("success")
    assert read(tmp_path) == []


def test_a_row_on_the_disk_still_grows_while_its_step_lasts(tmp_path):
    log = MetricsCSV(tmp_path)
    log.log_metrics({"loss": 1.0}, step=10)
    log.save()
    log.log_metrics({"loss": 2.0}, step=20)
    log.save()
    log.log_metrics({"val": 5.0}, step=20)
    log.finalize("success")
    log.log_metrics({"test": 6.0}, step=20)
    log.finalize("success")
    assert [list(r.values()) for r in read(tmp_path)] == [["10", "1.0", "", ""], ["20", "2.0", "5.0", "6.0"]]


def test_a_row_cut_off_by_a_kill_is_not_taken_for_data(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n10,1.0\n20,2.0\n3")
    log = MetricsCSV(tmp_path)
    log.rewind(20)
    log.log_metrics({"loss": 3.0}, step=30)
    log.finalize("success")
    assert [r["step"] for r in read(tmp_path)] == ["10", "20", "30"]


def test_rows_reach_the_disk_while_the_run_goes_on(tmp_path, monkeypatch):
    log = MetricsCSV(tmp_path)
    log.log_metrics({"loss": 1.0}, step=1)
    monkeypatch.setattr("project.engine.metrics_csv.SAVE_SECONDS", -1.0)
    log.log_metrics({"loss": 2.0}, step=2)
    assert [r["step"] for r in read(tmp_path)] == ["1", "2"]
    assert log.save_dir == str(tmp_path)
    assert (log.name, log.version) == ("", "")


def test_what_a_module_logs_itself_one_step_back_is_of_the_same_step_and_costs_no_row(tmp_path):
    """Lightning counts the steps of `self.log` from 0, the report from 1; a new column must not drop a finished row."""
    log = MetricsCSV(tmp_path)
    for step in (70, 75):
        log.log_metrics({"train/loss": step}, step=step)
        log.log_metrics({"my/l1": 1.0}, step=step - 1)
        log.save()
    log.log_metrics({"my/l1_epoch": 2.0}, step=74)
    log.log_metrics({"val/loss": 3.0}, step=75)
    log.log_metrics({"test/loss": 4.0}, step=75)
    log.finalize("success")
    first, second = read(tmp_path)
    assert (first["step"], first["train/loss"], first["my/l1"]) == ("70", "70", "1.0")
    assert {**second, "step": 75} == {
        "step": 75,
        "train/loss": "75",
        "my/l1": "1.0",
        "my/l1_epoch": "2.0",
        "val/loss": "3.0",
        "test/loss": "4.0",
    }


def test_a_new_column_keeps_every_row_that_is_finished(tmp_path):
    log = MetricsCSV(tmp_path)
    for step in range(5):
        log.log_metrics({"a": step}, step=step)
        log.save()
    log.log_metrics({"b": 5}, step=5)
    log.log_metrics({"c": 6}, step=6)
    log.save()
    log.log_metrics({"d": 6}, step=6)
    log.finalize("success")
    assert [r["step"] for r in read(tmp_path)] == [str(i) for i in range(7)]
    assert read(tmp_path)[6] == {"step": "6", "a": "", "b": "", "c": "6", "d": "6"}
