"""What a run says before its first step and after its last, and what it keeps quiet."""

import logging
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L

from project.data.datamodule import PARTS, StreamDataModule
from project.devices import is_rank_zero
from project.engine.checkpoint import Checkpoints
from project.resuming import changes

# Warnings of Lightning and torch that a user cannot act on
NOTHING_TO_DO = (
    "treespec.*LeafSpec",
    "callbacks used to create the checkpoint need to be provided",
    "is smaller than the logging interval",  # the report of an epoch covers its rest
    "does not have many workers",
    "Total length of `list` across ranks is zero",  # training without validation was asked for
    "`Trainer\\(barebones=True\\)` is configured",
)


def quiet() -> None:
    """Silence what Lightning says of itself; our own words go to the screen, from one process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # its tips and advertisements
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)  # comes only if asked for
    logging.basicConfig(format="%(message)s")
    logging.getLogger("project").setLevel(logging.INFO if is_rank_zero() else logging.ERROR)
    for words in NOTHING_TO_DO:
        warnings.filterwarnings("ignore", message=f".*{words}")


def say_start(
    folder: Path,
    devices: str,
    model: L.LightningModule,
    data: L.LightningDataModule,
    trainer: L.Trainer,
    command: str,
    checkpoints: Checkpoints | None,
) -> None:
    """The lines at the start: device, model, batch, rows, checkpoints, run folder."""
    net = getattr(model, "net", model)
    parameters = sum(p.numel() for p in model.parameters())  # of a subclass, too, that holds more than the net
    print(f"device      {devices}")
    print(f"model       {type(net).__name__}, {parameters:,} parameters")
    if not isinstance(data, StreamDataModule):
        print(f"data        {type(data).__name__}: who reads which row, and resuming exactly, are up to it")
    else:
        if command == "fit":
            sizes = data.batch_size, trainer.world_size, trainer.accumulate_grad_batches
            print(
                "batch       {} effective = {} rows x {} {} x {} accumulated".format(
                    data.effective_batch, sizes[0], sizes[1], "device" if sizes[1] == 1 else "devices", sizes[2]
                )
            )
        parts = PARTS if command == "fit" else ({"validate": "val"}.get(command, command),)
        print("rows        " + ", ".join(f"{len(data.part(p)[1]):,} {p}" for p in parts))
    if checkpoints is not None:
        best = "best" if checkpoints.save_top_k == 1 else f"{checkpoints.save_top_k} best"
        print(f"checkpoints the {best} by {checkpoints.monitor} ({checkpoints.mode or 'not said'}) and last.ckpt")
    print(f"run folder  {folder}", flush=True)


def say_resumed(path: str, checkpoint: dict[str, Any], saved_config: str, config: str, scheduler: Any) -> None:
    """Where training goes on, what differs from the saved config, what the schedule does now."""
    print(f"resume      {path}, after optimizer step {checkpoint['global_step']:,}")
    if saved_config:
        for change in changes(Path(saved_config).read_text(), config):
            print(f"changed     {change}")
    if scheduler:
        name = scheduler["class_path"].rpartition(".")[2]
        print(
            f"schedule    {name} goes on from step {checkpoint['global_step']:,}; its settings do not follow the limits"
        )


def say_scores(scores: Mapping[str, float]) -> None:
    """Metrics by stage, one a line."""
    names = [n for n in scores if n.partition("/")[0] in PARTS]
    for name in sorted(names, key=lambda n: (PARTS.index(n.partition("/")[0]), n)):
        print(f"  {name:<20}{scores[name]:.6g}")


def say_end(
    folder: Path, steps: int, rows: str, tested: str, scores: dict[str, float], seconds: float, memory: str
) -> None:
    """The lines at the end: what was trained and tested, scores, time, where everything is."""
    print(f"trained     {steps:,} optimizer step{'s' * (steps != 1)}{rows}")
    print(f"tested      {tested}")
    epoch_loss = scores.pop("train/epoch_loss", None)
    print("scores      train/ and val/ of the last epoch, test/ of what was tested")
    say_scores(scores if epoch_loss is None else {**scores, "train/loss": epoch_loss})
    print(f"time        {seconds:.1f} s; peak memory {memory}")
    print(f"results     {folder}: " + ", ".join(sorted(p.name for p in folder.iterdir())), flush=True)


def page(folder: Path, model: L.LightningModule, data: L.LightningDataModule, trainer: Any, tested: str) -> None:
    """``report.html``, where matplotlib and project/tools/ are there. An extra: the run is done without it."""
    if trainer.fast_dev_run or trainer.barebones:
        return
    if not all(map(find_spec, ("matplotlib", "project.tools", "project.tools.report"))):
        return
    try:
        path = import_module("project.tools.report").at_end(folder, model, data, trainer, tested)
        print(f"report      {path}", flush=True)
    except Exception as e:
        logging.getLogger("project").warning("report.html could not be written: %s", " ".join(str(e).split())[:300])


def rows_words(data: L.LightningDataModule, used: int) -> str:
    """How many rows were trained on, if they were counted, and how many each epoch left out."""
    words = f"; {used:,} rows used" if used else ""
    if not isinstance(data, StreamDataModule) or data.train_stream is None:
        return words
    used_an_epoch, rows = data.rows_of_epoch()
    shares, skipped = data.train_stream.chunks.shares, getattr(data.source, "skipped", 0)
    whole = shares.full + shares.tail
    left_out = (rows - whole, "dropped (an incomplete effective batch)"), (whole - used_an_epoch, "beyond the limit")
    why = ", ".join(f"{n:,} {reason}" for n, reason in left_out if n)
    words += f"; an epoch has {used_an_epoch:,} of {rows:,} rows: {why}" if why else f"; an epoch has all {rows:,} rows"
    return words + (f"; {skipped:,} bad rows skipped" if skipped else "")


def stopped_words(trainer: L.Trainer) -> str:
    """Which callback has ended training early, and for what reason, if one has."""
    stops = [c for c in trainer.early_stopping_callbacks if getattr(c, "stopped_epoch", 0)]
    why = (" ".join(str(getattr(c, "stopping_reason_message", None) or c.monitor).split()) for c in stops)
    return "".join(f"; stopped early: {words}" for words in why)


def scored_words(model: L.LightningModule, stage: str) -> str:
    """How many rows the scores of "val" or "test" are of, if the model counts them."""
    rows: int | None = getattr(model, "rows_scored", {}).get(stage)
    return "" if rows is None else f"; {rows:,} rows"


def has_test(data: L.LightningDataModule, trainer: L.Trainer) -> bool:
    """Whether there is anything to test on."""
    if trainer.barebones or trainer.limit_test_batches == 0:
        return False
    if isinstance(data, StreamDataModule):
        return len(data.part("test")[1]) > 0
    return type(data).test_dataloader is not L.LightningDataModule.test_dataloader
