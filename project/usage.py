"""What may be typed: the command line in one order, where each setting stands, and help that fits two screens."""

import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

TRAINER = frozenset(inspect.signature(Trainer.__init__).parameters) - {"self"}
COMMANDS = ("fit", "validate", "test", "predict")
DEFAULT_CLASSES = {
    "model": "project.module.Module",
    "data": "project.data.datamodule.StreamDataModule",
    "optimizer": "torch.optim.SGD",
}
SHORT_NAMES = ("torch.optim", "torch.optim.lr_scheduler", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")
HEAD = r"(?: \([^)]*\))?:\s"  # what follows the name of an argument in a docstring
EXAMPLES = """\
Examples:
  python train.py                                                     train the default model on the default data
  python train.py --config configs/generate.yaml --max_epochs 3       another experiment; any Trainer argument is a flag
  python train.py --accelerator gpu --devices 2 --data.batch_size 32  two GPUs, 32 rows each per micro-batch
  python train.py --config configs/linear.yaml --config configs/overlays/quick.yaml
  python train.py --optimizer Adam --optimizer.lr 0.001 --model.net my_nets.MLP --model.net.hidden 64
  python train.py predict --config configs/generate.yaml --ckpt_path runs/.../checkpoints/last.ckpt

A setting is taken from: flag > later --config > earlier --config > default. Flags are spelt out in full. More help:
  --help_trainer    every argument of the Trainer, each of them a flag    --print_config   what would run, as a file
  --model.help, --data.help, --optimizer.help CLASS and the like: the settings of a class"""


class UsageError(Exception):
    """A mistake of the user's, in words for people. Ends the command with exit code 2."""

    code = 2


class Failed(UsageError):
    """What was asked was not done, for a reason in words for people. Ends the command with exit code 1."""

    code = 1


# ---- the command line


def arguments(argv: list[str]) -> tuple[str, list[str], list[str]]:
    """The command, the config files in order, and the flags, the Trainer's in full (``--trainer.max_epochs``)."""
    argv = list(argv)
    command = argv.pop(0) if argv and not argv[0].startswith("-") else "fit"
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1) or [f"one of {', '.join(COMMANDS)}"]
        raise UsageError(f"{command}: no such command; did you mean {near[0]}?")
    files: list[str] = []
    flags: list[str] = []
    while argv:
        arg = argv.pop(0)
        name, equals, value = arg.partition("=")
        if name in ("--config", "-c"):
            if not equals and not argv:
                raise UsageError("--config: expected the name of a YAML file.")
            files.append(value if equals else argv.pop(0))
        else:
            bare = re.split(r"[.=+]", arg[2:], maxsplit=1)[0] if arg.startswith("--") else ""
            flags.append(f"--trainer.{arg[2:]}" if bare in TRAINER else arg)
    return command, files, flags


class Setting(NamedTuple):
    """A value that was typed, and the config file it stands in ("" for a flag)."""

    value: Any
    file: str


def settings_typed(files: Iterable[str], flags: list[str]) -> dict[str, Setting]:
    """All that was typed, by key (``init_args`` left out); the one that counts, if a key was typed twice."""
    entries = [e for file in files for e in _flat(yaml.safe_load(Path(file).read_text()), "", file)]
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        if flag.startswith("--"):
            name, equals, value = flag[2:].partition("=")
            entries.append((_key(name), Setting(value if equals else following, "")))
    found: dict[str, Setting] = {}
    for key, setting in entries:
        found[key] = setting
        if isinstance(setting.value, str):
            found.pop(f"{key}.class_path", None)  # a class by its path alone replaces the long form
    return found


def _flat(value: Any, key: str, file: str) -> Iterator[tuple[str, Setting]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        here = _key(f"{key}.{name}".lstrip("."))
        if name != "init_args":
            yield here, Setting(inner, file)
        yield from _flat(inner, here, file)


def _key(name: str) -> str:
    return re.sub(r"\.init_args\b", "", name).rstrip("+")


# ---- classes and their settings


def class_at(key: str, typed: dict[str, Setting]) -> type | None:
    """The class that was chosen at a key such as ``model.net`` or ``optimizer``, if it can be found."""
    chosen = [typed[name].value for name in (f"{key}.class_path", key) if name in typed]
    path = next((value for value in chosen if isinstance(value, str)), DEFAULT_CLASSES.get(key))
    return find_class(path) if path else None


def find_class(path: str) -> type | None:
    """A class by its path, or by its name alone where that is enough (``Adam``, ``EarlyStopping``)."""
    module, _, name = path.rpartition(".")
    for place in [module] if module else SHORT_NAMES:
        try:
            found = getattr(import_module(place), name, None)
        except Exception:  # a file of the user's that does not import: jsonargparse tells why
            return None
        if isinstance(found, type):
            return found
    return None


def parameters(cls: type) -> list[tuple[str, Any, str]]:
    """Name, default and documentation of what a class is made from, following ``**kwargs`` to its parents."""
    out: dict[str, tuple[Any, str]] = {}
    for base in inspect.getmro(cls):
        make = vars(base).get("__init__") or vars(base).get("__new__")  # torchmetrics.Accuracy has the latter alone
        if make is None:
            continue
        make = getattr(make, "__func__", make)
        doc = f"{inspect.getdoc(base)}\n\n{inspect.getdoc(make)}"
        found = inspect.signature(make).parameters
        for name, p in found.items():
            if name not in ("self", "cls") and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                text = re.search(rf"^ +{name}{HEAD}(.*?)(?=\n\s*\n|\n +\w+{HEAD}|\n\w|\Z)", doc, re.M | re.S)
                out.setdefault(name, (p.default, text[1] if text else ""))
        if not any(p.kind == p.VAR_KEYWORD for p in found.values()):
            break
    return [(name, default, text) for name, (default, text) in out.items()]


# ---- parser and help


class Parser(LightningArgumentParser):
    """Flags in full, mistakes in at most five lines, help in two screens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self.typed: dict[str, Setting] = {}

    def parse_command(self, files: list[str], flags: list[str]) -> Any:
        """The settings; a flag wins over every file, a later file over an earlier one."""
        self.typed = settings_typed(files, flags)
        for flag in flags:
            if flag == "--help_trainer":
                self._show("Trainer", self._class_help("trainer", Trainer))
            if match := re.fullmatch(r"--([\w.]+)\.help(=.*)?", flag):
                key, value = match[1], self.typed[f"{match[1]}.help"].value
                cls = find_class(value) if value and not value.startswith("--") else class_at(key, self.typed)
                if cls is None:
                    raise UsageError(f"--{key}.help {value}: no such class.")
                self._show(f"{cls.__module__}.{cls.__name__}", self._class_help(key, cls))
        return self.parse_args([part for file in files for part in ("--config", file)] + flags)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """A config that reruns. The input size of a net follows from the data, unless it had to be typed."""
        kwargs["skip_link_targets"] = self.exit_on_error and "model.net.in_features" not in self.typed
        text: str = super().dump(*args, **kwargs)
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of one class within the command's, which will put it in context
            super().error(message, ex)
        from project.mistakes import explain  # needed only now

        raise UsageError(explain(message, self)) from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        return "\n".join([*self._help(), "", EXAMPLES, ""])

    def _show(self, title: str, lines: Iterable[str]) -> NoReturn:
        print("\n".join([title, *lines]))
        sys.exit(0)

    def _help(self) -> Iterator[str]:
        yield "python train.py [fit|validate|test|predict] [--config FILE ...] [--NAME VALUE ...]      (default: fit)"
        for action in self._actions:
            name = (action.option_strings or [""])[-1]
            hidden = name.startswith(("--trainer", "--model", "--data", "--help", "--print_")) or name.endswith(".help")
            if name.startswith("--") and not hidden and name != "--checkpoint":
                yield from _entry(name, action.help or "", action.default)
        for key in ("model", "data"):
            cls = find_class(DEFAULT_CLASSES[key])
            assert cls is not None
            yield f"\n{key}: {cls.__name__}, or another class of {key} given as --{key} CLASS"
            yield from self._class_help(key, cls)

    def _class_help(self, key: str, cls: type) -> Iterator[str]:
        ours = self.get_defaults().get("trainer", {}) if key == "trainer" else {}
        for name, default, text in parameters(cls):
            if (key, name) not in (("optimizer", "params"), ("lr_scheduler", "optimizer")):  # given by the module
                here = f"{key}.{name}"
                typed = self.typed.get(f"{here}.class_path", self.typed.get(here, Setting(None, "")))
                if typed.file:  # of the config that would run
                    value = ", ".join(typed.value) if isinstance(typed.value, dict) else str(typed.value)
                    value = value.rpartition(".")[2] if isinstance(typed.value, str) else value
                    default = f"{value}, in {Path(typed.file).name}"
                elif name in ("devices", "max_epochs"):
                    default = ours.get(name, default)
                yield from _entry(f"--{short(here)}", text, default)


def short(key: str) -> str:
    """A key as a flag: ``trainer.`` may be left out."""
    bare = key.removeprefix("trainer.")
    return bare if bare.split(".")[0] in TRAINER else key


def _entry(name: str, text: str, default: Any) -> Iterator[str]:
    text = " ".join(text.replace("``", "").replace("%%", "%").split())
    shown = (
        ""
        if default in (None, inspect.Parameter.empty, "==SUPPRESS==") or isinstance(default, dict)
        else f" [{default}]"
    )
    lines = textwrap.wrap(text + shown, 86) or [""]
    if len(name) > 28:
        yield f"  {name}"
    else:
        yield f"  {name:<30}{lines.pop(0)}"
    yield from (" " * 32 + line for line in lines)
