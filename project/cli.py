"""The command: flags and config files → model, data, Trainer and run folder; what is run; exit codes."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningCLI

from project.building import build, saves, settle
from project.data.datamodule import StreamDataModule
from project.devices import check_devices, check_strategy, device_words, follow_launcher, is_rank_zero
from project.engine.checkpoint import Checkpoints
from project.engine.metrics_csv import MetricsCSV
from project.engine.predictions import PredictionWriter
from project.engine.resume import KEY, Resume, check_same
from project.mistakes import check_config_file, in_words, unwrapped
from project.module import Module
from project.resuming import (
    check_weights,
    finished,
    folder_to_resume,
    last_checkpoint,
    load,
    load_weights,
    settle_optimizer,
)
from project.run import Run, environment, experiment, has_ended, output_file
from project.settings import IN_FEATURES, ONCE, add_flags, check_objects, check_settings, net_size
from project.summary import (
    has_test,
    page,
    quiet,
    rows_words,
    say_end,
    say_resumed,
    say_scores,
    say_start,
    scored_words,
    stopped_words,
)
from project.usage import Failed, Parser, Setting, UsageError, arguments, settings_typed

DEFAULT_CONFIG = str(Path(__file__).parent.parent / "configs" / "linear.yaml")


class CLI(LightningCLI):
    """What a command line asks for: ``model``, ``datamodule``, ``trainer`` and, in the process that speaks, ``run``."""

    def __init__(self, argv: list[str]) -> None:
        self.command, self.files, self.flags = arguments(argv)
        self.resumed = folder_to_resume(self.command, settings_typed([], self.flags))
        self.saved_config = str(self.resumed / "config.yaml") if self.resumed else ""
        self.files = [f for f in (self.saved_config, *self.files) if f]
        self.finished = self.complete = False  # trained to the limits; and all that comes after is done too
        self.run: Run | None = None
        self.checkpoints: Checkpoints | None = None
        self.output = Path()
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,  # the run folder keeps the config
            seed_everything_default=0,
            trainer_defaults={"devices": 1, "max_epochs": 10, "precision": "32-true"},
            parser_class=Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # from a checkpoint come plain values only
            run=False,  # one parser, for the command in use; ``main`` runs it
        )

    # ---- settings

    def add_arguments_to_parser(self, parser: Any) -> None:
        add_flags(parser)
        parser.link_arguments("data", IN_FEATURES, compute_fn=self._net_size, apply_on="instantiate")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        sections = {"trainer", "model", "data", "optimizer", "checkpoint"}
        files = self.files or [DEFAULT_CONFIG]
        for file in files:
            check_config_file(file, sections)
        self.config = parser.parse_command(files, self.flags)

    def typed(self, name: str) -> bool:
        """Whether a setting, or one of its parts, comes from a flag or a config file rather than from a default."""
        untyped = (DEFAULT_CONFIG, self.saved_config or DEFAULT_CONFIG)  # the latter ranks with its checkpoint
        typed: dict[str, Setting] = self.parser.typed  # type: ignore[attr-defined]  # it is our Parser
        return any(f"{k}.".startswith(f"{name}.") and s.file not in untyped for k, s in typed.items())

    def _net_size(self, data: L.LightningDataModule) -> Any:
        return net_size(self.config, self.typed("model.net.in_features"), data)

    # ---- objects

    def before_instantiate_classes(self) -> None:
        check_settings(self.config, self.command)
        path, safe = self.config.ckpt_path, self.config.weights_only
        if self.resumed:
            path = str(last_checkpoint(self.resumed))
        self.path, local = path, path and "://" not in path
        self.checkpoint = load("--resume" if self.resumed else "--ckpt_path", path, safe) if local else {}
        self.replaced = settle_optimizer(self.config, self.typed, self.checkpoint)
        follow_launcher(self.config.trainer, self.typed("trainer.devices"))
        check_devices(self.config.trainer)
        check_strategy(self.config.trainer)

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate(self.config)
        self.model, self.datamodule = self.config_init.model, self.config_init.data
        if isinstance(self.model, Module) and type(self.model).configure_optimizers is Module.configure_optimizers:
            self.model.optimizer, self.model.lr_scheduler = self.config_init.optimizer, self.config_init.lr_scheduler
        elif own := [name for name in ("optimizer", "lr_scheduler") if self.typed(name) and self.command == "fit"]:
            raise UsageError(f"--{own[0]}: {type(self.model).__name__} has a configure_optimizers of its own.")
        check_weights("--resume" if self.resumed else "--ckpt_path", self.path or "", self.checkpoint, self.model)
        if self.config.init_weights:
            load_weights(self.config.init_weights, self.model, self.config.weights_only)
        self.trainer = self.instantiate_trainer()
        self.finished = self.command == "fit" and finished(self.checkpoint, self.trainer, self.typed("trainer"))
        self.complete = self.finished and (self.resumed is None or has_ended(self.resumed))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The Trainer with our parts. The run folder is reserved."""
        config = dict(self.config_init.trainer)
        if every := self.config.val_every_n_steps:  # Lightning counts micro-batches
            config.update(val_check_interval=every * config["accumulate_grad_batches"], check_val_every_n_epoch=None)
        if self.command == "fit" and saves(config):
            self.checkpoints = self.config_init.checkpoint
        if is_rank_zero():
            name = self.experiment = experiment(self.files[0] if self.files else DEFAULT_CONFIG)
            replace = self.config.resume == "auto"
            self.run = Run(self.resumed or self.config.run_dir, name, resumed=bool(self.resumed), replace=replace)
        step = self.checkpoint["global_step"] if self.resumed else None
        resume = Resume(self.config.resume_changed, self.replaced)
        objects = config, self.model, self.datamodule, self.run, self.checkpoints
        trainer, self.report = build(*objects, step, resume, self.config.nonfinite, self.config.oom)
        return trainer

    # ---- before, during and after the run

    def start(self) -> None:
        """Refuse what the data and the model cannot do, fill the run folder, and say what is about to run."""
        self.begun = time.monotonic()
        if self.complete and self.run is not None:
            self.run.discard()
            print(f"complete    {self.path} has reached --max_epochs or --max_steps; larger limits go on from there")
        if self.complete or self.run is None:
            return
        check_objects(self.command, self.model, self.datamodule, self.trainer)
        if isinstance(self.datamodule, StreamDataModule) and self.command == "fit" and not self.config.resume_changed:
            check_same(self.datamodule, self.checkpoint)
        if self.command == "predict":
            self.output = output_file(self.config.output, self.run.folder)
        settle(self.run, self.model, self.trainer, self.checkpoints)
        devices = device_words(self.trainer)
        config = self.config.clone()
        for name in ONCE:
            config.pop(name, None)
        text = self.parser.dump(config, skip_unset=False, skip_validation=True)
        if self.checkpoint and self.command == "fit":
            say_resumed(self.path, self.checkpoint, self.saved_config, text, self.config.get("lr_scheduler"))
        for logger in self.trainer.loggers:
            if self.resumed and isinstance(logger, MetricsCSV):
                logger.rewind(self.checkpoint["global_step"], self.checkpoint.get(KEY, {}).get("row"))
        self.run.record(text, environment(devices, self.experiment), self.checkpoint.get("global_step", 0))
        say_start(self.run.folder, devices, self.model, self.datamodule, self.trainer, self.command, self.checkpoints)

    def fit(self) -> None:
        """Train; then test the best checkpoint, or what there is, and say what was done."""
        trainer, saved = self.trainer, self.checkpoints
        trainer.fit(self.model, self.datamodule, ckpt_path=self.path, weights_only=self.config.weights_only)
        first = self.report.first_step
        steps = trainer.global_step - (trainer.global_step if first is None else first)
        if not steps and not self.finished:
            raise Failed("Nothing was trained: no optimizer step was made. See --max_epochs, --max_steps, the limits.")
        learns = self.model.automatic_optimization and self.report in trainer.callbacks  # type: ignore[attr-defined]
        if steps and learns and not {"train/loss", "train/epoch_loss"} & self.report.last.keys():
            raise Failed(
                "Nothing was learned: training_step returned no loss. Return it, or a dictionary with loss in it."
            )
        stopped = stopped_words(trainer)  # asked now: the checkpoint that is tested brings its own
        scores, tested = dict(self.report.last), "nothing: no test data, or none asked for"
        if has_test(self.datamodule, trainer):
            path = (saved.best_path or saved.last_path) if saved is not None else ""
            trainer.test(self.model, self.datamodule, ckpt_path=path or None, weights_only=True, verbose=False)
            best = next(iter(saved.best.items()), None) if saved is not None else None
            which = f"best by {saved.monitor} ({best[1]:.6g})" if saved is not None and best else "last"
            tested = f"{Path(path).name}, the {which}" if path else "the weights in memory"
            tested += scored_words(self.model, "test")
            scores |= {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("test/")}
        if self.run is not None:
            rows, seconds = rows_words(self.datamodule, self.report.rows_used), time.monotonic() - self.begun
            say_end(self.run.folder, steps, rows + stopped, tested, scores, seconds, self.report.memory.peak_words())
            self.run.ended()
            if self.config.report_page:
                page(self.run.folder, self.model, self.datamodule, trainer, tested)

    def validate(self) -> None:
        """Score a checkpoint on the validation rows; ``test`` on the test rows."""
        path, safe = self.config.ckpt_path, self.config.weights_only
        score = getattr(self.trainer, self.command)
        score(self.model, self.datamodule, path, verbose=False, weights_only=safe)
        if self.run is not None:
            print(f"{self.command:<12}done{scored_words(self.model, 'val' if self.command == 'validate' else 'test')}")
            say_scores({name: float(v) for name, v in self.trainer.callback_metrics.items()})
            print(f"results     {self.run.folder}", flush=True)

    test = validate

    def predict(self) -> None:
        """Predictions go to a file a batch at a time; nothing is kept in memory."""
        writer, safe = PredictionWriter(self.output), self.config.weights_only
        self.trainer.callbacks.append(writer)  # type: ignore[attr-defined]  # not in Lightning's annotations
        self.trainer.predict(self.model, self.datamodule, None, False, self.config.ckpt_path, safe)
        if self.run is not None:
            print(f"predictions {writer.written:,} rows in {self.output}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit codes: 0 what was asked was done; 1 failed; 2 wrong use, nothing touched."""
    quiet()
    cli = None
    try:
        cli = CLI(sys.argv[1:] if argv is None else argv)
        cli.start()
        if not cli.complete:
            getattr(cli, cli.command)()
    except Exception as wrapped:
        e = unwrapped(wrapped, cli.run.folder if cli is not None and cli.run is not None else None)
        if not isinstance(e, UsageError) and not in_words(e):
            raise e from e.__cause__
        started = cli is not None and cli.trainer.global_step > 0
        code = e.code if isinstance(e, UsageError) else 1 if started else 2
        if cli is not None and cli.run is not None and code == 2:
            cli.run.discard()
        if is_rank_zero() or started:
            print(f"train.py: error: {e}", file=sys.stderr)
        sys.exit(code)
