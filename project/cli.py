"""The command: flags and config files → Trainer, model and data; what is said at the start and the end; exit codes."""

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.loggers import TensorBoardLogger

from project.data.datamodule import StreamDataModule
from project.devices import check_devices, device_words, follow_launcher, is_rank_zero
from project.engine.checkpoint import AtomicCheckpointIO, Checkpoints
from project.engine.metrics_csv import MetricsCSV
from project.engine.predictions import ENDINGS, PredictionWriter
from project.engine.report import Report
from project.module import Module
from project.run import Run, environment
from project.summary import has_test, rows_words, say_end, say_scores, say_start
from project.usage import COMMANDS, TRAINER, Parser, UsageError, check_config_file, config_files

log = logging.getLogger("project")
DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "linear.yaml"
NOT_SAVED = ("config", "ckpt_path", "run_dir", "output", "verbose", "return_predictions")


def arguments(argv: list[str]) -> list[str]:
    """The command line as LightningCLI wants it: subcommand first, then config files, then flags; Trainer flags in full.

    Config files go before flags whatever their place, so a flag always wins.
    """
    argv = list(argv)
    command = argv.pop(0) if argv and argv[0] in COMMANDS else "fit"
    configs, flags = [], []
    while argv:
        arg = argv.pop(0)
        if arg in ("--config", "-c"):
            configs += ["--config", argv.pop(0) if argv else ""]
        elif arg.startswith(("--config=", "-c=")):
            configs += ["--config", arg.partition("=")[2]]
        else:
            name = arg[2:].replace("=", ".", 1).replace("+", ".", 1).split(".")[0] if arg.startswith("--") else ""
            flags.append(f"--trainer.{arg[2:]}" if name in TRAINER else arg)
    if not configs:
        configs = ["--config", str(DEFAULT_CONFIG)]
    for file in configs[1::2]:
        check_config_file(file)
    return [command, *configs, *flags]


class CLI(LightningCLI):
    """LightningCLI with our defaults: a module and a data module that need no class path, one run folder, plain words."""

    def __init__(self, argv: list[str]) -> None:
        self.run: Run | None = None
        self.report: Report | None = None
        self.checkpoints: Checkpoints | None = None
        names = config_files(argv)
        self.experiment = Path(names[0]).stem if names else DEFAULT_CONFIG.stem
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={"devices": 1, "max_epochs": 10, "logger": None},
            parser_class=Parser,
            parser_kwargs={"default_env": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=arguments(argv),
        )

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument(
            "--run_dir", type=str | None, help="The run folder, exactly. Default: runs/<config name>/<time>."
        )
        parser.add_argument("--output", type=str | None, help="predict: the .csv, .parquet or .npy file to write.")
        parser.add_argument(
            "--optimizer",
            type=OptimizerCallable,
            default={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
            help="Optimizer class of torch.optim; its settings as --optimizer.lr and so on. [SGD, lr 0.01]",
        )
        parser.add_argument(
            "--lr_scheduler",
            type=LRSchedulerCallable | None,
            default=None,
            help="Scheduler class of torch.optim.lr_scheduler; it moves once an optimizer step.",
        )
        parser.add_class_arguments(Checkpoints, "checkpoint")
        parser.set_defaults({"model": {"class_path": "project.module.Module"}})
        parser.set_defaults({"data": {"class_path": "project.data.datamodule.StreamDataModule"}})
        parser.link_arguments("data.in_features", "model.init_args.net.init_args.in_features", apply_on="instantiate")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """From a checkpoint come plain values only: LightningCLI would let what it holds override what was typed."""

    def setting(self, name: str, default: Any = None) -> Any:
        return self.config[self.subcommand].get(name, default)

    # ---- objects

    def instantiate_classes(self) -> None:
        command = self.subcommand
        if self.setting("trainer.default_root_dir") is not None:
            raise UsageError("--default_root_dir: give the run folder with --run_dir.")
        if command != "fit" and not self.setting("ckpt_path"):
            raise UsageError(f"{command} needs --ckpt_path, the checkpoint to {command} with.")
        if (path := self.setting("ckpt_path")) and not Path(path).exists():
            raise UsageError(f"--ckpt_path {path}: no such file.")
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, RuntimeError, OSError) as e:
            raise UsageError(_innermost(e)) from e

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The Trainer with our callbacks, after the run folder is reserved."""
        config = dict(self.config_init[self.subcommand]["trainer"])
        self.wants_logger = config["logger"] in (None, True)
        bare, draw = config["barebones"], config["enable_progress_bar"]
        own_bar = any(isinstance(c, ProgressBar) for c in config["callbacks"] or [])
        ours: list[L.Callback] = []
        if not bare:
            self.report = Report(draw=draw is not False and not own_bar)
            ours.append(self.report)
            if not own_bar:
                config["enable_progress_bar"] = False
            if self.wants_logger:
                config["logger"] = False
            if config["enable_checkpointing"] is not False and self.subcommand == "fit" and not config["fast_dev_run"]:
                self.checkpoints = self.config_init[self.subcommand]["checkpoint"]
                ours.append(self.checkpoints)
            elif config["enable_checkpointing"] is None:
                config["enable_checkpointing"] = False
        check_devices(config)
        follow_launcher(config, self.typed("devices"))
        if isinstance(self.model, Module):
            self.model.optimizer = self.config_init[self.subcommand]["optimizer"]
            self.model.lr_scheduler = self.config_init[self.subcommand]["lr_scheduler"]
        if is_rank_zero():
            self.run = Run(self.setting("run_dir"), self.experiment)
            config["default_root_dir"] = str(self.run.folder)
        callbacks = config.pop("callbacks") or []
        config["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), *ours]
        try:
            trainer = self.trainer_class(**config)
        except Exception as e:
            if self.run is not None:
                self.run.discard()
            raise UsageError(_trainer_refusal(e, config)) from e
        if type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO":
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def typed(self, name: str) -> bool:
        """Whether a Trainer setting comes from a flag or a config file rather than from a default."""
        flagged = any(a.split("=")[0] in (f"--{name}", f"--trainer.{name}") for a in sys.argv)
        files = [yaml.safe_load(Path(f).read_text()) or {} for f in config_files(sys.argv) or [str(DEFAULT_CONFIG)]]
        return flagged or any(name in (f.get("trainer") or {}) for f in files)

    # ---- before and after a command

    def before_fit(self) -> None:
        self._begin()

    before_validate = before_test = before_predict = before_fit

    def _begin(self) -> None:
        """Refuse what cannot work, then fill the run folder and say what is about to run. Only rank 0 speaks."""
        self.begun = time.monotonic()
        if self.run is None:
            return
        try:
            self._check()
            self._output = self._output_file() if self.subcommand == "predict" else None
        except (ValueError, OSError) as e:
            self.run.discard()
            raise UsageError(_innermost(e)) from e
        devices = device_words(self.setting("trainer.accelerator"), self.trainer)
        self.run.record(self._config_to_rerun(), environment(devices))
        self._attach_folder(self.run.folder)
        say_start(
            self.run.folder, devices, self.model, self.datamodule, self.trainer, self.subcommand, self.checkpoints
        )

    def _check(self) -> None:
        data = self.datamodule
        if not isinstance(data, StreamDataModule):
            return
        data.trainer = self.trainer
        data.prepare_data()
        stated, found = self.setting("model.init_args.net.init_args.in_features"), data.in_features
        if stated not in (None, found):
            raise ValueError(
                f"--model.net.in_features {stated}: the data has {found} input columns.\n"
                "Leave it out, it follows from --data.source; or choose other columns there."
            )
        data.check(self.subcommand)
        if isinstance(self.model, Module):
            source, _ = data.part("predict" if self.subcommand == "predict" else "train")
            self.model.check_input(source.read(torch.zeros(1, dtype=torch.int64))[0])

    def _output_file(self) -> Path:
        assert self.run is not None
        given = self.setting("output")
        path = Path(given) if given else self.run.folder / "predictions.csv"
        if path.suffix not in ENDINGS:
            raise ValueError(f"--output {path}: expected a name that ends in {', '.join(ENDINGS)}.")
        if path.exists():
            raise ValueError(f"--output {path} exists and is not overwritten: choose another name.")
        if not path.parent.is_dir():
            raise ValueError(f"--output {path}: there is no folder {path.parent}.")
        return path

    def _config_to_rerun(self) -> str:
        config = self.config[self.subcommand].clone()
        for name in NOT_SAVED:
            config.pop(name, None)
        text: str = self._parser(self.subcommand).dump(config, skip_link_targets=True, skip_validation=True)
        return text

    def _attach_folder(self, folder: Path) -> None:
        if self.wants_logger and not self.trainer.fast_dev_run and not self.trainer.barebones:
            board = TensorBoardLogger(folder, name="", version="tensorboard")
            self.trainer.loggers = [MetricsCSV(folder), board]
        if self.checkpoints is not None:
            self.checkpoints.dirpath = folder / "checkpoints"

    def predict(self, **kwargs: Any) -> None:
        """Predictions go to a file a batch at a time; nothing is kept in memory."""
        path = self._output if self.run is not None else Path()
        self.trainer.callbacks.append(writer := PredictionWriter(path))  # type: ignore[attr-defined]
        self.trainer.predict(**{**kwargs, "return_predictions": False})
        if self.run is not None:
            print(f"predictions {writer.written:,} rows in {path}")

    def after_fit(self) -> None:
        """Test the best checkpoint, or what there is; then say what was done."""
        trainer, saved = self.trainer, self.checkpoints
        steps, report = trainer.global_step, self.report
        finals = dict(report.last) if report is not None else {}
        rows = rows_words(self.datamodule)
        if not steps:
            raise RuntimeError("Nothing was trained: no optimizer step was made. See --max_epochs and --max_steps.")
        path = (saved.best_path or saved.last_path) if saved is not None else ""
        tested = "nothing: there is no test data"
        if has_test(self.datamodule) and not trainer.barebones:
            trainer.test(self.model, self.datamodule, ckpt_path=path or None, weights_only=True, verbose=False)
            finals |= {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("test/")}
            tested = (
                f"{Path(path).name}, the {'best' if saved and saved.best_path else 'last'}"
                if path
                else "the weights in memory"
            )
        if self.run is not None:
            say_end(
                self.run.folder,
                steps,
                rows,
                tested,
                finals,
                time.monotonic() - self.begun,
                trainer.strategy.root_device,
            )

    def after_validate(self) -> None:
        if self.run is not None:
            scores = {name: float(v) for name, v in self.trainer.callback_metrics.items()}
            say_scores(scores)
            print(f"results     {self.run.folder}", flush=True)

    after_test = after_validate


def _trainer_refusal(e: Exception, config: dict[str, Any]) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return "The Trainer refuses these settings: " + " ".join(lines)[:500]


def _innermost(e: BaseException) -> str:
    """The words of the first cause; what wraps it only repeats the configuration."""
    while (inner := e.__cause__ or e.__context__) is not None:
        e = inner
    return str(e) or type(e).__name__


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit codes: 0 what was asked was done; 1 failed; 2 wrong use, nothing touched."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # its tips and advertisements are not ours
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO if is_rank_zero() else logging.ERROR)
    # Lightning's own business: nothing here that a user could act on
    warnings.filterwarnings("ignore", message=".*treespec.*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
    argv = sys.argv[1:] if argv is None else argv
    try:
        CLI(argv)
    except UsageError as e:
        print(f"train.py: error: {e}", file=sys.stderr)
        sys.exit(2)
