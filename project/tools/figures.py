"""What the report page shows: curves of runs, and predictions against targets. No pyplot, which keeps every figure."""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import classification as scores
from torchmetrics import functional as F

POINTS = 1_000  # of a curve
STAGES = {"train": ("C0", "-"), "val": ("C1", "--"), "test": ("C2", ":")}
LABELS = {"lr": "learning rate", "rows_per_s": "rows/s", "memory_mb": "memory, MB"}

Curve = dict[str, list[tuple[float, float]]]  # by column of metrics.csv: (step, value)


def _axes(count: int) -> tuple[Figure, list[Any]]:
    lines = -(-count // 3) or 1
    figure = Figure(figsize=(13.5, 3.6 * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, 3, i + 1) for i in range(count)]


def curves(names: list[str], runs: list[Curve]) -> Figure:
    """A panel for the loss, each metric, learning rate, rows/s and memory; several runs by colour, stages by line."""
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        stage, _, rest = name.rpartition("/")
        panels.setdefault(rest.removeprefix("epoch_") if stage in STAGES else name, []).append(name)
    order = ["loss", *sorted(panels.keys() - {"loss", *LABELS}), *LABELS]
    figure, axes = _axes(len(panels))
    for panel, ax in zip((p for p in order if p in panels), axes, strict=True):
        for i, run in enumerate(runs):
            for name in (n for n in panels[panel] if n in run and (n != "train/epoch_loss" or len(runs) == 1)):
                color, line = STAGES.get(name.partition("/")[0], ("C0", "-"))
                color, label = (f"C{i % 10}", f"{names[i]}  {name}") if len(runs) > 1 else (color, name)
                color = "C9" if name == "train/epoch_loss" else color
                points = np.array([point for point in run[name] if np.isfinite(point[1])] or [(np.nan, np.nan)])
                if len(points) > POINTS:
                    points = np.array([some.mean(0) for some in np.array_split(points, POINTS)])
                marker = "o" if len(points) < 15 else ""
                ax.plot(*points.T, line, color=color, label=_plain(label), marker=marker, ms=3, lw=1.3)
        values = [v for line in ax.lines for v in line.get_ydata() if v == v] or [1.0]
        if panel == "loss" and 0 < 20 * min(values) < max(values):
            ax.set_yscale("log")
        elif panel in ("rows_per_s", "memory_mb"):
            ax.set_ylim(0, 1.15 * max(values) or 1)
        ax.set(title=_plain(LABELS.get(panel, panel)), xlabel="optimizer step")
        ax.grid(alpha=0.25)
        if panel not in LABELS or len(runs) > 1:
            ax.legend(fontsize=7)
    return figure


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula


def predictions(kind: str, pred: Tensor, target: Tensor) -> Figure:
    """Prediction against target and residuals, or ROC, calibration and confusion.

    Args:
        kind: "regression", "binary" or "multiclass".
        pred: Predictions [N, ...]; of classes, their probabilities.
        target: Targets [N, ...]; of several classes, their numbers.
    """
    figure, axes = _axes(3)
    alone: dict[str, Any] = {"sync_on_compute": False}  # one rank draws; the others are not there to exchange anything
    if kind == "regression":
        _draw_regression(axes, pred.double().reshape(len(pred), -1), target.double().reshape(len(pred), -1))
    elif kind == "binary":
        pred, target = pred.flatten(), target.flatten().long()
        area = float(F.classification.binary_auroc(pred, target))
        error = float(F.classification.binary_calibration_error(pred, target))
        titles = f"ROC, area {area:.4g}", f"calibration, error {error:.3g}"
        _draw_classes(
            axes, titles, scores.BinaryROC(**alone), scores.BinaryConfusionMatrix(**alone), pred, target, pred, target
        )
    else:
        n, (sure, best) = pred.shape[1], pred.max(1)
        area = float(F.classification.multiclass_auroc(pred, target, n))
        error = float(F.classification.multiclass_calibration_error(pred, target, n))
        roc = scores.MulticlassROC(n, average=None if n <= 10 else "macro", **alone)
        titles = f"ROC, each class against the rest, area {area:.4g}", f"calibration of the choice, error {error:.3g}"
        matrix = scores.MulticlassConfusionMatrix(n, **alone)
        _draw_classes(axes, titles, roc, matrix, pred, target, sure, (best == target).long())
    return figure


def _draw_regression(axes: list[Any], pred: Tensor, target: Tensor) -> None:
    for i in range(min(10, pred.shape[1])):
        look: Any = {"s": 8, "alpha": min(0.8, 2000 / len(pred)), "color": f"C{i}", "rasterized": True, "lw": 0}
        residual = (target - pred)[:, i]
        axes[0].scatter(target[:, i], pred[:, i], **look)
        axes[1].scatter(pred[:, i], residual, **look)
        axes[2].hist(residual, bins=50, color=f"C{i}", alpha=0.7, label=f"output {i}")
    ends = [float(target.min()), float(target.max())]
    axes[0].plot(ends, ends, color="black", lw=0.8)
    axes[1].axhline(0, color="black", lw=0.8)
    r2 = f"R² {float(F.r2_score(pred, target)):.4g}, " if len(pred) > 1 else ""
    mae = f"MAE {float(F.mean_absolute_error(pred, target)):.4g}"
    axes[0].set(title=f"against the target: {r2}{mae}", xlabel="target", ylabel="prediction")
    axes[1].set(title="residuals", xlabel="prediction", ylabel="target − prediction")
    axes[2].set(title="residuals", xlabel="target − prediction", ylabel="rows")
    if pred.shape[1] > 1:
        axes[2].legend(fontsize=7)


def _draw_classes(
    axes: list[Any], titles: Any, roc: Any, matrix: Any, pred: Tensor, target: Tensor, sure: Tensor, hit: Tensor
) -> None:
    """``sure``: the probability given; ``hit``: whether what it was given to came true."""
    for metric in (roc, matrix):
        metric.update(pred, target)
    roc.plot(ax=axes[0])
    matrix.plot(ax=axes[2], add_text=len(matrix.compute()) <= 12)
    bins = (sure * 10).long().clamp(0, 9)
    count = torch.bincount(bins, minlength=10)
    said, seen = (torch.bincount(bins, v.double(), 10)[count > 0] / count[count > 0] for v in (sure, hit))
    axes[1].bar(np.arange(10) / 10 + 0.05, count / count.sum(), 0.1, alpha=0.2, label="share of rows")
    axes[1].plot(said, seen, "o-", ms=4, label="observed")
    for ax in axes[:2]:
        ax.plot([0, 1], [0, 1], color="grey", lw=0.8, ls=":")
    axes[0].set(title=titles[0], xlabel="false positive rate", ylabel="true positive rate")
    axes[1].set(title=titles[1], xlabel="predicted probability", ylabel="observed")
    axes[2].set_title("confusion")
    axes[2].set_xlabel("predicted class", fontsize=10)
    axes[2].set_ylabel("true class", fontsize=10)
    axes[1].legend(fontsize=7)
