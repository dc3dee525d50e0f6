"""Runs to look at: ``python -m project.tools.report RUN_DIR [RUN_DIR …]`` writes report.html, a page by itself.

Only text and plain numbers of a run folder are read and none of it is run, so a stranger's folder can be looked at;
``--predict`` alone rebuilds the model, and for that trusts the config like code.
"""

import argparse
import base64
import csv
import html
import importlib.util
import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import yaml
from torch import nn

from project.data.datamodule import StreamDataModule
from project.resuming import _flat
from project.usage import UsageError

ROWS, PIECE = 10_000, 500  # predictions drawn at most; rows read at once
KINDS = ("regression", "binary", "multiclass")
SAMPLE = "predictions-sample.npz"
MARK = '<meta name="generator" content="project.tools.report">'
FACTS = ("started", "devices", "command", "git.revision", "packages.torch", "packages.lightning")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">{mark}<title>{title}</title><meta name="viewport"
content="width=device-width"><meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
style-src 'unsafe-inline'"><style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;
padding:0 1rem;color:#222;background:#fff}}h1{{font-size:1.5rem}}h2{{font-size:1.1rem;margin:2rem 0 .5rem}}
img{{width:100%}}
table{{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}}tr+tr{{border-top:1px solid #eee}}
td,th{{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}}td{{font-family:ui-monospace,monospace}}
summary{{cursor:pointer;font-weight:600;margin:.5rem 0}}p{{color:#666;margin:.2rem 0}}</style>
<h1>{title}</h1>{body}</html>
"""


class Looked:
    """What was found in a run folder; files that are not there leave their part of the page empty.

    Raises:
        UsageError: If it is no run folder, or a file cannot be read as what it should be.
    """

    def __init__(self, folder: Path) -> None:
        if not any((folder / name).is_file() for name in ("config.yaml", "metrics.csv")):
            raise UsageError(f"{folder}: neither config.yaml nor metrics.csv there; expected the folder of a run.")
        self.name, path = folder.resolve().name, folder
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.sample: dict[str, Any] = {}
        try:
            if (path := folder / "config.yaml").exists():
                config = _flat(yaml.safe_load(path.read_text()) or {})
                self.config = {name.replace(".init_args", ""): value for name, value in config}
            if (path := folder / "environment.json").exists():
                self.environment = dict(_flat(json.loads(path.read_text())))
            if (path := folder / "metrics.csv").exists():
                for row in csv.DictReader(path.read_text().rpartition("\n")[0].splitlines()):  # a kill may cut a line
                    for name in (n for n, value in row.items() if value and n not in ("step", "epoch", "steps_per_s")):
                        self.curves.setdefault(name, []).append((float(row["step"]), float(row[name])))
            if (path := folder / SAMPLE).exists():
                with np.load(path, allow_pickle=False) as file:
                    self.sample = {name: str(file[name]) for name in ("kind", "words")}
                    self.sample |= {name: torch.from_numpy(file[name]) for name in ("pred", "target")}
                if len(self.sample["pred"]) != len(self.sample["target"]) or self.sample["kind"] not in KINDS:
                    raise ValueError("not what a run writes there")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as e:
            raise UsageError(f"{path} cannot be read: {' '.join(str(e).split())[:200]}") from None


# ---- predictions to draw


def predictions(model: Any, data: Any, weights: str) -> dict[str, Any]:
    """Predictions for at most ``ROWS`` rows of the test part, or of the validation part if there is none.

    Args:
        model: A trained module, x [N, ...] → predictions; left in the mode it is in.
        data: A StreamDataModule, or any LightningDataModule with batches (x, y).
        weights: Which weights these are, in words.

    Returns:
        What is drawn: ``pred`` [N, ...] (probabilities of a classifier), ``target`` [N, ...], ``kind`` and ``words``.

    Raises:
        ValueError: If there is nothing that could be drawn.
    """
    part, total, batches = _rows(data)
    weight, training, pairs, count = next(model.parameters()), model.training, [], 0
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for x, y, *_ in batches:
                pred = model(x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype))
                pairs.append((pred[: ROWS - count].float().cpu(), y[: ROWS - count].cpu()))
                if (count := count + len(y)) >= ROWS:
                    break
    finally:
        model.train(training)
    pred, target = (torch.cat(side) for side in zip(*pairs, strict=True))
    kind, loss = "regression", getattr(model, "loss", None)
    if isinstance(loss, nn.BCELoss | nn.BCEWithLogitsLoss):
        kind, pred = "binary", pred.sigmoid() if isinstance(loss, nn.BCEWithLogitsLoss) else pred
    elif isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and not target.is_floating_point():
        kind, pred = "multiclass", pred.exp() if isinstance(loss, nn.NLLLoss) else pred.softmax(1)
    if not pred.isfinite().all():
        raise ValueError("predictions that are not finite")
    if pred.ndim > 2 or (kind != "multiclass" and pred.numel() != target.numel()):
        raise ValueError(f"no plots for predictions of shape {list(pred.shape)} and targets {list(target.shape)}")
    words = f"{len(pred):,} of {total} {part} rows, predicted by {weights}"
    return {"kind": kind, "words": words, "pred": pred, "target": target}


def _rows(data: Any) -> tuple[str, str, Iterable[Any]]:
    """Which part, how many rows it has, and batches of it."""
    for part in ("test", "val"):
        if not isinstance(data, StreamDataModule):
            name = f"{part}_dataloader"
            if getattr(type(data), name) is not getattr(L.LightningDataModule, name):
                loader = getattr(data, name)()
                return part, "the", loader[0] if isinstance(loader, list) else loader
        elif n := len((found := data.part(part))[1]):
            source, rows = found
            at = torch.arange(n)
            if n > ROWS:  # in pieces: single rows here and there would read all of a file
                starts = torch.linspace(0, n - PIECE, ROWS // PIECE, dtype=torch.float64).long()
                at = (starts[:, None] + torch.arange(PIECE)).flatten()
            return part, f"{n:,}", (source.read(rows.rows(some)) for some in torch.split(at, PIECE))
    raise ValueError("no test or validation rows to predict")


# ---- the page


def figures(runs: list[Looked]) -> Iterator[tuple[str, str, Any]]:
    """(title, words, matplotlib Figure): curves of all runs, overlaid; then the predictions of each.

    Raises:
        UsageError: If there is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the page needs matplotlib: pip install matplotlib")
    draw = importlib.import_module("project.tools.figures")
    yield "Curves", "", draw.curves([run.name for run in runs], [run.curves for run in runs])
    for run in (run for run in runs if run.sample):
        name = f" of {run.name}" if len(runs) > 1 else ""
        sample = {key: value for key, value in run.sample.items() if key != "words"}
        with warnings.catch_warnings():  # of classes that have no rows
            warnings.simplefilter("ignore")
            figure = draw.predictions(**sample)
        yield f"Predictions{name}", run.sample["words"], figure


def write(path: Path, runs: list[Looked], drawn: Iterable[tuple[str, str, Any]], note: str = "") -> None:
    """One HTML file with everything in it; it loads and runs nothing."""
    names = [run.name for run in runs]
    ends = [{n: f"{v[-1][1]:.6g}" for n, v in run.curves.items()} for run in runs]
    body = _table(names, [{n: r.environment.get(n) for n in FACTS} for r in runs])
    if len(runs) > 1:
        body += f"<h2>Settings that differ</h2>{_table(names, [r.config for r in runs], differing=True)}"
    for title, words, figure in drawn:
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", dpi=110)
        data = base64.b64encode(svg.getvalue()).decode()
        body += f'<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p><img alt="{html.escape(title)}" '
        body += f'src="data:image/svg+xml;base64,{data}">'  # an image, in which nothing can run
    body += f"<p>{html.escape(note)}</p><h2>Last values</h2>{_table(names, ends)}"
    for title, tables in (("Config", [r.config for r in runs]), ("Environment", [r.environment for r in runs])):
        body += f"<details><summary>{title}</summary>{_table(names, tables)}</details>"
    title = html.escape(names[0] if len(names) == 1 else f"{len(names)} runs")
    path.write_text(PAGE.format(mark=MARK, title=title, body=body))


def _table(names: list[str], columns: list[dict[str, Any]], differing: bool = False) -> str:
    rows = [["", *names]] if len(names) > 1 else []
    for key in dict.fromkeys(k for column in columns for k in column):
        cells = ["" if column.get(key) is None else str(column[key]) for column in columns]
        if not differing or len(set(cells)) > 1:
            rows.append([key, *cells])
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in cells[1:]) for cells in rows)
    heads = (f"<th>{html.escape(cells[0])}</th>" for cells in rows)
    return f"<table>{''.join(f'<tr>{h}{line}</tr>' for h, line in zip(heads, lines, strict=True))}</table>"


def at_end(folder: Path, model: L.LightningModule, data: L.LightningDataModule, trainer: Any, tested: str) -> Path:
    """At the end of a run, on rank 0 alone: predictions to draw, the page, and its figures in TensorBoard."""
    note, weights = "", "the weights at the end" if tested.startswith("nothing") else tested.partition(";")[0]
    try:
        if type(trainer.strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):  # all ranks, or none
            raise ValueError("the weights are spread over several processes")
        np.savez_compressed(folder / SAMPLE, **predictions(model, data, weights))
    except Exception as e:  # a model or data of the user's own may be of any form
        note = f"No predictions are drawn: {' '.join(str(e).split())[:300]}"
    run, path = Looked(folder), folder / "report.html"
    drawn = [*figures([run])]
    write(path, [run], drawn, note)
    for logger in trainer.loggers:
        if type(logger).__name__ == "TensorBoardLogger":
            for title, _, figure in drawn:
                logger.experiment.add_figure(title.lower(), figure, trainer.global_step)
            logger.experiment.close()
    return path


def main(argv: list[str] | None = None) -> None:
    """Exit codes: 0 written; 2 wrong use, nothing written."""
    parser = argparse.ArgumentParser("python -m project.tools.report", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="default: report.html, of one run in its folder, of several here")
    parser.add_argument("--predict", action="store_true", help="predict anew; config.yaml is trusted like code")
    asked = parser.parse_args(argv)
    path = asked.output or (asked.run_dir[0] if len(asked.run_dir) == 1 else Path()) / "report.html"
    try:
        if path.exists() and MARK not in path.read_text(errors="replace")[:500]:
            raise UsageError(f"{path} exists and is no page of this command; choose another name with --output.")
        runs = [Looked(folder) for folder in asked.run_dir]
        for folder, run in zip(asked.run_dir, runs, strict=True) if asked.predict else ():
            rebuilt = importlib.import_module("project.tools.export").Rebuilt(folder)
            run.sample = predictions(rebuilt.model, rebuilt.datamodule, Path(rebuilt.path).name)
        write(path, runs, figures(runs))
        print(f"report      {path}")
    except (UsageError, OSError, ValueError, RuntimeError) as e:
        print(f"report: error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
