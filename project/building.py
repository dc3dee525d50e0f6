"""The Trainer with our callbacks, loggers and plugins: one place for the command and for ``fit`` in notebooks."""

from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from project.devices import plugins, strategy
from project.engine.checkpoint import AtomicCheckpointIO, Checkpoints
from project.engine.lean import NoProfiler, spare
from project.engine.nonfinite import NonFinite
from project.engine.oom import OutOfMemory
from project.engine.report import Report
from project.engine.resume import Resume
from project.engine.signals import Signals
from project.run import Run, loggers
from project.usage import UsageError


class SavesAtEnd(L.Callback):
    """Saves the end of a run before callbacks that then put other weights in, such as an average; Lightning lets
    checkpoint callbacks come last."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.checkpoints.on_train_end(trainer, pl_module)


def saves(config: dict[str, Any]) -> bool:
    """Whether a fit with these arguments of the Trainer keeps checkpoints of ours."""
    return not config["barebones"] and not config["fast_dev_run"] and config["enable_checkpointing"] is not False


def build(
    config: dict[str, Any],
    model: L.LightningModule,
    data: L.LightningDataModule,
    run: Run | None,
    checkpoints: Checkpoints | None = None,
    step: int | None = None,
    resume: Resume | None = None,
    nonfinite: Literal["stop", "skip"] = "stop",
    oom: Literal["split", "stop"] = "split",
) -> tuple[L.Trainer, Report]:
    """A Trainer with our parts, each of which steps back for one of the user's, and what reports its losses.

    Args:
        config: All arguments of the Trainer.
        model, data: What will be run.
        run: The run folder, in the process that speaks; taken back if the Trainer refuses the settings.
        checkpoints: What saves; its place and measure are settled here.
        step: The optimizer step resumed from.
        resume: What keeps the position, if not one that starts anew.
        nonfinite, oom: As the flags of these names.

    Raises:
        UsageError: With what the Trainer says.
    """
    given = config["callbacks"] or []
    callbacks = list(given) if isinstance(given, list) else [given]
    bare, dry = config["barebones"], config["barebones"] or config["fast_dev_run"]
    own_bar = any(isinstance(c, ProgressBar) for c in callbacks)
    report = Report(draw=config["enable_progress_bar"] is not False and not own_bar)
    try:
        config = {**config, "strategy": strategy(config, model, data), "plugins": plugins(config["plugins"])}
    except UsageError:
        if run is not None:
            run.discard()
        raise
    if bare:
        report.first_step = 0  # which nobody will tell it
    else:
        callbacks.insert(0, report)  # first: it knows of a step before a callback of the user's can fail
        callbacks += [resume or Resume(), Signals(), NonFinite(nonfinite), OutOfMemory(oom)]
        if not own_bar:
            config["enable_progress_bar"] = False
        config["enable_model_summary"] = bool(config["enable_model_summary"])
        config["profiler"] = config["profiler"] or NoProfiler()
    if checkpoints is not None:
        callbacks += [checkpoints]
        callbacks.insert(not bare, SavesAtEnd(checkpoints))
    elif config["enable_checkpointing"] is None and not bare:
        config["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in callbacks)
    if run is not None:
        config["default_root_dir"] = str(run.folder)
    if config["logger"] is not False and not bare:
        config["logger"] = [] if dry else loggers(run, step, config["logger"])
    try:
        trainer = L.Trainer(**config | {"callbacks": callbacks})
    except Exception as e:  # of whatever type: all that happened is that settings were looked at
        if run is not None:
            run.discard()
        raise UsageError("The Trainer refuses these settings: " + " ".join(str(e).split())[:500]) from e
    spare(trainer)
    if type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO":
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return trainer, report


def settle(run: Run, model: L.LightningModule, trainer: L.Trainer, checkpoints: Checkpoints | None) -> None:
    """Tell checkpoints and profiler their place in the run folder, and checkpoints what the model measures."""
    if checkpoints is not None:
        checkpoints.dirpath = run.folder / "checkpoints"
        checkpoints.follow(model)
    run.take_profile(trainer.profiler)  # type: ignore[attr-defined]
