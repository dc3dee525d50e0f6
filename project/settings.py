"""Our own flags, and what is refused before a run: settings that contradict each other, data the model cannot take."""

import contextlib
import difflib
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import torchmetrics
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from project.data.datamodule import StreamDataModule
from project.engine.checkpoint import Checkpoints
from project.engine.parts import DoesNotFit, is_memory, must_be_memory
from project.module import Module
from project.scores import Scores
from project.usage import DEFAULT_CLASSES, UsageError

STEPS = ("training_step", "validation_step", "predict_step", "forward")
IN_FEATURES = "model.init_args.net.init_args.in_features"
# Asked of one run, so not part of the config that reruns it.
ONCE = ("config", "ckpt_path", "run_dir", "output", "resume", "resume_changed", "init_weights")


def add_flags(parser: Any) -> None:
    """The flags that are ours; those of Trainer, model and data follow from their signatures."""
    parser.add_argument("--run_dir", type=str | None, help="The run folder. Default: runs/<config name>/<time>.")
    parser.add_argument("--resume", type=str | None, help="Go on in this run folder; auto: in --run_dir, if it can.")
    parser.add_argument("--resume_changed", type=bool, default=False, help="Resume even if it cannot be exact.")
    parser.add_argument("--ckpt_path", type=str | None, help="Checkpoint to go on from, or to evaluate.")
    parser.add_argument("--init_weights", type=str | None, help="Checkpoint to take only the weights from.")
    parser.add_argument("--weights_only", type=bool, default=True, help="Safe loading; false trusts the checkpoint.")
    parser.add_argument("--val_every_n_steps", type=PositiveInt | None, help="Validate in optimizer steps.")
    parser.add_argument(
        "--nonfinite",
        type=Literal["stop", "skip"],
        default="stop",
        help="On a loss or gradient that is not finite: stop, or skip the step and count it.",
    )
    parser.add_argument(
        "--oom",
        type=Literal["split", "stop"],
        default="split",
        help="On a step that runs out of memory: its rows in smaller parts, with the same gradient, or stop.",
    )
    parser.add_argument("--report_page", type=bool, default=True, help="report.html at the end, with matplotlib.")
    parser.add_argument("--output", type=str | None, help="predict: the .csv, .parquet or .npy file to write.")
    parser.add_argument(
        "--optimizer",
        type=OptimizerCallable,
        default={"class_path": DEFAULT_CLASSES["optimizer"], "init_args": {"lr": 0.01}},
        help="Class of torch.optim; its settings as --optimizer.lr and so on. [SGD, lr 0.01]",
    )
    parser.add_argument(
        "--lr_scheduler",
        type=LRSchedulerCallable | None,
        default=None,
        help="Class of torch.optim.lr_scheduler; it moves once an optimizer step.",
    )
    parser.add_class_arguments(Checkpoints, "checkpoint")
    parser.set_defaults({name: {"class_path": DEFAULT_CLASSES[name]} for name in ("model", "data")})


def check_settings(config: Any, command: str) -> None:
    """Refuse what cannot work before any data is opened.

    Raises:
        UsageError: Naming the flags.
    """
    path = config.ckpt_path
    if path and config.init_weights:
        raise UsageError("--ckpt_path and --init_weights: the first restores everything; leave one of them out.")
    if config.trainer.default_root_dir is not None:
        raise UsageError("--default_root_dir: give the run folder with --run_dir.")
    if command != "fit" and not path:
        raise UsageError(f"{command} needs --ckpt_path, the checkpoint to {command} with.")
    if path and "://" not in path and not Path(path).exists():
        raise UsageError(f"--ckpt_path {path}: no such file.")
    if config.output and command != "predict":
        raise UsageError(f"--output {config.output}: only predict writes such a file.")
    if (micro := config.trainer.accumulate_grad_batches) < 1:
        raise UsageError(f"--accumulate_grad_batches {micro}: expected a whole number of at least 1.")
    if config.val_every_n_steps and config.trainer.val_check_interval not in (None, 1.0):
        raise UsageError("--val_every_n_steps and --val_check_interval both say when to validate; leave one out.")


def check_objects(command: str, model: L.LightningModule, data: L.LightningDataModule, trainer: L.Trainer) -> None:
    """Refuse an optimizer that cannot be made, data that is too little, and rows that the net cannot take.

    Raises:
        UsageError, ValueError, DoesNotFit: With what was found, and the flag that helps.
    """
    if isinstance(model, Module):
        try:
            model.configure_optimizers()
        except ValueError as e:
            raise UsageError(f"--optimizer, --lr_scheduler: {e}") from e
        names = [f"{stage}/{name}" for stage in ("val", "train") for name in ("loss", *model.scores_of("val").metrics)]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # not in Lightning's annotations
            wrong = getattr(callback, "monitor", None)
            if wrong and wrong not in names and (near := difflib.get_close_matches(wrong, names, 1, 0.75)):
                where = "--checkpoint.monitor" if isinstance(callback, Checkpoints) else type(callback).__name__
                raise UsageError(f"{where}: nothing called {wrong} to monitor; did you mean {near[0]}?")
    if isinstance(data, StreamDataModule):
        data.trainer = trainer
        data.prepare_data(command)
        data.check(command)
        if isinstance(model, Module) and not any(p.is_meta for p in model.parameters()):
            source, _ = data.part("predict" if command == "predict" else "train")
            for rows in (min(8, len(source)), 1):
                batch = source.read(torch.arange(rows))
                wide = batch[0].dtype in (torch.float64, torch.float16, torch.bfloat16)
                if wide and trainer.precision == "32-true":
                    raise UsageError(f"--data.source: read gives {batch[0].dtype} inputs; torch.float32 is expected.")
                try:
                    check_step(model, batch, command)
                    break
                except (RuntimeError, MemoryError) as e:
                    must_be_memory(e)
            else:
                weights = sum(p.nbytes for p in model.parameters()) / 1e6
                raise DoesNotFit(
                    "Out of memory before the start: not even one row fits on the CPU, where a net is tried first. "
                    f"Its weights take {weights:,.0f} MB.\nMake it smaller with --model.net, or free memory of this "
                    "machine; the most that a net needs later is in docs/memory.md."
                )


def check_step(model: Module, batch: tuple[torch.Tensor, ...], command: str) -> None:
    """Try a few rows before training starts: they must suit the net, and its predictions the loss and the metrics.

    Raises:
        ValueError: With what was tried, and what was said of it. An error of memory stands.
    """
    own = {f for f in STEPS if getattr(type(model), f) is not getattr(Module, f)}
    if "forward" in own or ("predict_step" in own if command == "predict" else own >= {*STEPS[:2]}):
        return  # what the steps give to the net is up to them
    if command != "predict" and len(batch) != 2:
        raise ValueError(
            f"--data.source: read gives {len(batch)} tensors; inputs and targets (x, y) are expected.\n"
            "For others, override training_step and validation_step of project.module.Module."
        )
    x, net, parameters = batch[0], type(model.net).__name__, [*model.net.parameters()]
    training = model.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a net may draw, and must draw the same without this
        try:
            if parameters:
                x = x.to(parameters[0].device, parameters[0].dtype if x.is_floating_point() else x.dtype)
            pred = model.net.eval()(x)
        except (RuntimeError, TypeError) as e:
            if is_memory(e):
                raise
            wants = [m.in_features for m in model.net.modules() if isinstance(m, torch.nn.Linear)][:1]
            raise ValueError(
                f"The data has {x.shape[-1]} input columns, but {net} refuses rows of shape {list(x.shape)}: "
                f"{str(e).splitlines()[0]}.\n"
                + (f"Its first layer takes {wants[0]}. " if wants else "")
                + "Choose the columns with --data.source, or a net of that size with --model.net."
            ) from None
        finally:
            model.train(training)
        if not isinstance(pred, torch.Tensor):
            raise ValueError(f"--model.net {net} gives a {type(pred).__name__}; a tensor of predictions is expected.")
        if command == "predict":
            return
        loss, y = type(model.loss).__name__, batch[1].to(pred.device)
        if isinstance(model.loss, torch.nn.CrossEntropyLoss) and pred.ndim > 1 and pred.shape[1] == 1:
            raise ValueError(
                f"--model.loss CrossEntropyLoss: {net} has one output, and of one class the loss is always 0.\n"
                "Use --model.loss torch.nn.BCEWithLogitsLoss, or a net with an output for each class."
            )
        shapes = f"{list(pred.shape)} from {pred.min():.3g} to {pred.max():.3g} and targets {list(y.shape)} ({y.dtype})"
        tried = "--model.loss " + loss
        try:
            value = model.compute_loss(pred, y)
            if value.numel() != 1:
                raise ValueError(
                    f"it gives a result of shape {list(value.shape)}; one number is expected: reduction mean"
                )
            tried = "--model.metrics"
            model.measure("val", pred, y, value)
            scores = model.scores_of("val")
            scores.settle()
            alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
            for name, metric in scores.metrics.items() if alone else ():  # else they would wait for the other processes
                tried = f"--model.metrics.{name}"
                with contextlib.suppress(ValueError):  # not defined on so few rows
                    found = cast(torchmetrics.Metric, metric).compute()
                    if not isinstance(found, torch.Tensor) or found.numel() != 1:
                        raise TypeError("its result is not one number; choose an average, or a metric that is one")
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as e:
            if is_memory(e):
                raise
            raise ValueError(f"{tried}: refuses predictions {shapes}: {' '.join(str(e).split())[:300]}") from None
        finally:
            for metric in (m for m in model.modules() if isinstance(m, torchmetrics.Metric | Scores)):
                metric.reset()


def net_size(config: Any, typed: bool, data: L.LightningDataModule) -> int | None:
    """The input size of the net, which follows from the data; data of the user's own may not tell it.

    Args:
        config: All settings.
        typed: Whether ``in_features`` of the net is among those that the user typed.
        data: What has the columns.

    Raises:
        UsageError: If what was typed contradicts the data, or neither tells it.
    """
    stated, found = config.get(IN_FEATURES), getattr(data, "in_features", None)
    if typed and found not in (None, stated):
        raise UsageError(
            f"--model.net.in_features {stated}: the data has {found} input columns.\n"
            "Leave it out, it follows from --data.source; or choose other columns there."
        )
    if stated is found is None and IN_FEATURES in config:
        raise UsageError(f"--model.net.in_features is needed: {type(data).__name__} has no in_features of its own.")
    size: int | None = stated if found is None else found
    return size
