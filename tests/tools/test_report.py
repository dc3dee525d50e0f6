"""The report page: what it shows, that it needs nothing and runs nothing, and that a run is done without it."""

import base64
import html.parser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("matplotlib")

import project.summary
from project.tools import figures, report

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


class Page(html.parser.HTMLParser):
    """Tags, their attributes, text and images of a page; every tag opened is closed."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.open, self.images, self.words = [], [], [], []
        self.feed(path.read_text())
        assert self.open == []
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "img":
            kind, _, data = attrs["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.images.append(base64.b64decode(data).decode())
        elif tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


def folder(path, kind="regression", lr=0.1, rows=40, **changes):
    """A run folder as a run leaves it, with 40 reports and predictions of ``rows`` rows."""
    path.mkdir()
    config = {"model": {"init_args": {"net": "project.models.LinearModel"}}, "optimizer": {"init_args": {"lr": lr}}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"devices": "CPU (1 threads)", "packages": {"torch": "2.13.0"}, "started": "2026-01-01"}
    (path / "environment.json").write_text(json.dumps(environment))
    lines = [f"{s},{1 / s},{lr},{100 + s},410,{2 / s if s % 10 == 0 else ''}," for s in range(1, 41)]
    head = "step,train/loss,lr,rows_per_s,memory_mb,val/loss,test/r2\n"
    (path / "metrics.csv").write_text(head + "\n".join(lines) + "\n40,,,,,,0.5\n41,0.")
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(rows, generator=generator)
    pred = target + 0.1 * torch.rand(rows, generator=generator)
    if kind == "binary":
        pred, target = pred / 1.1, (target > 0.5).float()
    elif kind == "multiclass":
        target = (3 * target).long()
        pred = (2.0 * torch.eye(3)[target] + torch.rand(rows, 3, generator=generator)).softmax(1)
    sample = {"kind": kind, "words": f"{rows} of {rows} test rows", "pred": pred, "target": target} | changes
    np.savez(path / report.SAMPLE, **sample)
    return path


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


def test_one_run_config_environment_device_and_curves(tmp_path, capsys):
    report.main([str(folder(tmp_path / "first"))])
    page = Page(tmp_path / "first" / "report.html")
    for found in ("CPU (1 threads)", "optimizer.lr", "project.models.LinearModel", "packages.torch", "40 test rows"):
        assert found in page.text
    assert len(page.images) == 2
    run = report.Looked(tmp_path / "first")
    assert [len(run.curves[name]) for name in ("train/loss", "val/loss", "test/r2")] == [40, 4, 1]  # not the cut line
    figure = figures.curves(["first"], [run.curves])
    assert titles(figure) == ["loss", "r2", "learning rate", "rows/s", "memory, MB"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["train/loss", "val/loss"]


def test_values_that_are_not_finite_leave_gaps_and_long_runs_are_averaged():
    values = [(float(step), float(step % 2)) for step in range(10_000)]
    run = {"train/loss": [(1.0, 2.0), (2.0, float("nan")), (3.0, float("inf"))], "memory_mb": [(1.0, float("nan"))]}
    loss, acc, memory = figures.curves(["run"], [run | {"train/acc": values}]).axes
    assert list(loss.lines[0].get_ydata()) == [2.0]
    assert (len(acc.lines[0].get_ydata()), set(acc.lines[0].get_ydata())) == (1000, {0.5})
    assert memory.get_ylim()[0] == 0


@pytest.mark.slow
def test_the_page_is_one_file_that_loads_and_runs_nothing(tmp_path):
    """... also where names in the folder are HTML or formulas: it may be a stranger's."""
    path = folder(tmp_path / "<script>alert(1)<script>")
    evil = "<img src=http://example.com onerror=alert(1)>$\\frac"
    (path / "config.yaml").write_text(yaml.safe_dump({"model": evil}))
    text = (path / "metrics.csv").read_text()
    (path / "metrics.csv").write_text(text.replace("test/r2", evil))
    report.main([str(path)])
    page = Page(path / "report.html")
    assert evil in page.text
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "link", "object"} == set()
    outside = [a for _, attrs in page.tags for n, a in attrs.items() if n in ("src", "href") and a[:5] != "data:"]
    assert outside == []
    policy = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy[0]
    assert all("<script" not in image for image in page.images)


class Marker:
    def __reduce__(self):
        return print, ("code of the folder ran",)


def test_a_strangers_folder_runs_no_code(tmp_path, capsys):
    path = folder(tmp_path / "theirs", pred=np.array([Marker()], dtype=object))
    with pytest.raises(SystemExit, match="2"):
        report.main([str(path)])
    shutil.rmtree(path)
    path = folder(tmp_path / "theirs")
    (path / "config.yaml").write_text("model: !!python/object/apply:builtins.print ['code of the folder ran']\n")
    with pytest.raises(SystemExit, match="2"):
        report.main([str(path)])
    screen = capsys.readouterr()
    assert f"{report.SAMPLE} cannot be read" in screen.err
    assert "config.yaml cannot be read" in screen.err
    assert "code of the folder ran" not in screen.out
    assert not (path / "report.html").exists()


@pytest.mark.slow
def test_several_runs_overlaid_and_the_settings_that_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [folder(tmp_path / name, lr=lr) for name, lr in (("slow", 0.1), ("fast", 0.5))]
    report.main([str(run) for run in runs])
    page = Page(tmp_path / "report.html")
    differ = page.text.partition("Settings that differ")[2].partition("Curves")[0].split()
    assert differ == ["slow", "fast", "optimizer.lr", "0.1", "0.5"]
    looked = [report.Looked(run) for run in runs]
    figure = figures.curves(["slow", "fast"], [run.curves for run in looked])
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert lines["slow  train/loss"] == lines["slow  val/loss"] != lines["fast  train/loss"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("regression", ["against the target: R² 0.", "residuals", "residuals"]),
        ("binary", ["ROC, area 0.9", "calibration, error ", "confusion"]),
        ("multiclass", ["ROC, each class against the rest, area 1", "calibration of the choice", "confusion"]),
    ],
)
def test_plots_that_fit_the_task(tmp_path, kind, words):
    run = report.Looked(folder(tmp_path / "run", kind, rows=200))
    sample = {key: value for key, value in run.sample.items() if key != "words"}
    found = titles(figures.predictions(**sample))[:3]
    assert all(title.startswith(start) for title, start in zip(found, words, strict=True)), found
    if kind == "binary":
        right = int(((sample["pred"] > 0.5) == sample["target"].bool()).sum())
        cells = figures.predictions(**sample).axes[2].texts
        assert sum(int(c.get_text()) for c in (cells[0], cells[3])) == right


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere: neither config.yaml nor metrics.csv there"),
        (["run", "--output", "mine.html"], "mine.html exists and is no page of this command"),
        (["run", "--output", "no/folder/page.html"], "No such file or directory"),
    ],
)
def test_mistakes_in_one_line(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "run")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        report.main(argv)
    screen = capsys.readouterr().err
    assert words in screen
    assert len(screen.splitlines()) == 1
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        report.main([str(folder(tmp_path / "run"))])
    assert "pip install matplotlib" in capsys.readouterr().err


# ---- at the end of a run


@pytest.fixture
def with_page(monkeypatch):
    monkeypatch.setattr(project.summary, "find_spec", importlib.util.find_spec)


def test_a_run_ends_with_the_page_and_its_figures_in_tensorboard(run, small, with_page):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run("--config", "configs/generate.yaml", *small)
    assert done.out.splitlines()[-1] == f"report      {done.folder / 'report.html'}"
    page = Page(done.folder / "report.html")
    assert re.search(r"20 of 20 test rows, predicted by best-step=20\.ckpt", page.text)
    events = EventAccumulator(str(done.folder / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["curves", "predictions"]
    assert events.Images("curves")[0].step == 20
    with np.load(done.folder / report.SAMPLE, allow_pickle=False) as file:
        assert (str(file["kind"]), len(file["pred"])) == ("binary", 20)


def test_a_page_that_cannot_be_written_does_not_fail_the_run(run, small, with_page, monkeypatch, caplog):
    monkeypatch.setattr(figures, "curves", lambda *args: 1 / 0)
    done = run(*small)
    assert done.code == 0
    assert "report.html could not be written: division by zero" in caplog.text


@pytest.mark.parametrize("gone", ["matplotlib", "project.tools", "project.tools.report"])
def test_nothing_is_missed_where_a_part_is_not_there(run, small, monkeypatch, gone):
    monkeypatch.setattr(project.summary, "find_spec", lambda name: None if name == gone else sys)
    done = run("--max_steps", "1", *small)
    assert done.code == 0
    assert not (done.folder / "report.html").exists()
    assert "report.html" not in done.err


def test_a_switch_turns_it_off(run, small, with_page):
    done = run("--report_page", "false", "--max_steps", "1", *small)
    assert done.code == 0
    assert not (done.folder / "report.html").exists()


# ---- slow: a browser, the folder deleted


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"no headless browser; looked for {', '.join(BROWSERS)}")
@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass"])
def test_a_browser_shows_every_figure(tmp_path, kind):
    """The screenshot has the colours of curves and plots in the upper and the lower figure, and white around them."""
    import matplotlib.image

    path = folder(tmp_path / "run", kind, rows=200)
    report.main([str(path)])
    shot, page = tmp_path / "shot.png", path / "report.html"
    flags = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1400", f"--screenshot={shot}"]
    subprocess.run([BROWSER, "--headless", *flags, page.as_uri()], check=True, timeout=120, capture_output=True)
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape == (1400, 1280, 3)
    blue = pixels[..., 2] - pixels[..., 0] > 0.25
    assert blue[:850].sum() > 200
    assert blue[850:].sum() > 200
    assert (pixels == 1).all(2).mean() > 0.5


@pytest.mark.slow
def test_a_run_is_the_same_when_the_tools_are_deleted(tmp_path):
    shutil.copytree(ROOT / "project", tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "train.py", tmp_path)
    (tmp_path / "project" / "tools" / "report.py").unlink()
    flags = ["--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "1"]
    for name in ("file", "folder"):
        command = [sys.executable, "train.py", "--run_dir", name, *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "report" not in done.stdout.splitlines()[-1]
        shutil.rmtree(tmp_path / "project" / "tools", ignore_errors=True)


@pytest.mark.slow
def test_predictions_are_made_again_on_request(run, small):
    done = run(*small)
    assert not (done.folder / report.SAMPLE).exists()
    report.main([str(done.folder), "--predict"])
    assert "20 of 20 test rows" in Page(done.folder / "report.html").text
