"""What the command says to people: help that fits two screens, and errors that name the key, its place and the remedy."""

import difflib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

TRAINER = frozenset(inspect.signature(Trainer.__init__).parameters) - {"self"}
COMMANDS = ("fit", "validate", "test", "predict")
EXAMPLES = """\
Examples:
  python train.py                                                     train the default model on the default data
  python train.py --config configs/generate.yaml --max_epochs 3       another experiment; any Trainer argument is a flag
  python train.py --accelerator gpu --devices 2 --data.batch_size 32  two GPUs, 32 rows each per micro-batch
  python train.py --config configs/linear.yaml --config configs/overlays/quick.yaml
  python train.py --optimizer Adam --optimizer.lr 0.001 --model.net.class_path my_nets.MLP
  python train.py predict --config configs/generate.yaml --ckpt_path runs/.../checkpoints/last.ckpt

Settings: flag > later --config > earlier --config > default. Flags are spelt out in full. More help:
  --help_trainer   all arguments of the Trainer         --print_config   what would run, as a config file
  --model.help CLASS, --data.help CLASS, --optimizer.help CLASS          the settings of one class"""


class UsageError(Exception):
    """A mistake of the user's, in words for people. Ends the command with exit code 2."""


class Parser(LightningArgumentParser):
    """The command's parser: flags in full, errors in at most five lines, the Trainer's help on demand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(explain(message, self.flag_names()))

    def flag_names(self) -> list[str]:
        """Every name a user may type, without dashes."""
        names = {option.lstrip("-") for action in self._actions for option in action.option_strings}
        for action in self._actions:
            for sub in (getattr(action, "_name_parser_map", None) or {}).values():
                names |= set(sub.flag_names())
        return sorted(names | {n for n in TRAINER if f"trainer.{n}" in names})

    def format_help(self) -> str:
        lines = super().format_help().splitlines() if "--help_trainer" in sys.argv else self._short_help()
        return "\n".join([*lines, "", EXAMPLES, ""])

    def _short_help(self) -> Iterator[str]:
        yield "python train.py [fit|validate|test|predict] [--config FILE ...] [--NAME VALUE ...]      (default: fit)"
        for action in self._actions:
            name = (action.option_strings or [""])[-1]
            if not name.startswith("--") or name.startswith(
                ("--trainer", "--help", "--print_shtab", "--model", "--data")
            ):
                continue
            if name.endswith(".help") or (name.startswith("--checkpoint") and "." not in name):
                continue
            yield from _entry(name, action.help or "", action.default)
        for prefix, cls in (("model", "project.module.Module"), ("data", "project.data.datamodule.StreamDataModule")):
            yield f"\n{prefix} (of {cls}; another class: --{prefix}.class_path)"
            for name, default, text in parameters(_import(cls)):
                yield from _entry(f"--{prefix}.{name}", text, default)


def _entry(name: str, text: str, default: Any) -> Iterator[str]:
    shown = "" if default in (None, inspect.Parameter.empty) or len(str(default)) > 24 else f" [{default}]"
    lines = textwrap.wrap(" ".join(text.split()).replace("%%", "%") + shown, 84) or [""]
    yield f"  {name:<30}  {lines[0]}"
    yield from (" " * 34 + line for line in lines[1:])


def parameters(cls: type) -> list[tuple[str, Any, str]]:
    """Name, default and documentation of what a class is made from, following ``**kwargs`` to its parents."""
    out: dict[str, tuple[Any, str]] = {}
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base):
            continue
        doc = inspect.getdoc(base) or ""
        found = inspect.signature(vars(base)["__init__"]).parameters
        for name, p in found.items():
            if name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                text = re.search(rf"^ +{name}: (.*?)(?=\n +\w+: |\n\n|\n\w|\Z)", doc, re.M | re.S)
                out.setdefault(name, (p.default, text[1] if text else ""))
        if not any(p.kind == p.VAR_KEYWORD for p in found.values()):
            break
    return [(name, default, text) for name, (default, text) in out.items()]


def _import(path: str) -> type:
    module, _, name = path.rpartition(".")
    found = getattr(__import__(module, fromlist=[name]), name)
    assert isinstance(found, type)
    return found


# ---- errors


def explain(message: str, known: list[str]) -> str:
    """jsonargparse's message in at most five lines: the key, where it stands, the nearest valid name."""
    text = re.sub(
        r"\n\s*(Given value|Subtypes|Does not validate|Errors:|- Expected a <class 'NoneType'>)[^\n]*", "", message
    )
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    parent = re.findall(r'[Pp]arser key "([\w.]+)"', text)
    if unknown := re.search(r"(?:does not accept option|Option) '([\w.+]+)'(?: is not accepted)?", text):
        return _unknown(
            unknown[1] if "does not accept option" in text else ".".join([*parent, unknown[1]]), text, known
        )
    if flags := re.findall(r"--[\w.+-]+", text.partition("nrecognized arguments:")[2]):
        return _unknown(flags[0].lstrip("-"), text, known)
    lines = [line.strip(" -") for line in text.splitlines() if line.strip(" -")]
    if parent:
        name = parent[-1]
        details = [re.sub(r'.*[Pp]arser key "[\w.]+":?', "", line).strip() for line in lines]
        return "\n".join([f"{_spelt(name)}{_place(name)}: {' '.join(d for d in details if d)}"[:600]])
    return "\n".join(lines[:5])


def _unknown(key: str, text: str, known: list[str]) -> str:
    names = list(known)
    for cls in re.findall(r"class_path '([\w.]+)'", text):
        names += [f"{key.rpartition('.')[0]}.{name}" for name, *_ in parameters(_import(cls))]
    if "class_path" not in text:
        for prefix, cls in (("data", "project.data.datamodule.StreamDataModule"), ("model", "project.module.Module")):
            names += [f"{prefix}.{name}" for name, *_ in parameters(_import(cls))]
        names += [f"optimizer.{name}" for name in ("lr", "momentum", "weight_decay")]
    near = difflib.get_close_matches(key, names, 1, 0.6) or _same_leaf(key, names)
    hint = f"; did you mean {_spelt(near[0])}?" if near else "; see --help."
    return f"{_spelt(key)}{_place(key)}: no such setting{hint}"


def _same_leaf(key: str, names: list[str]) -> list[str]:
    """A right name at the wrong depth: `trainer.trainer.max_steps`, or `data.max_steps`."""
    leaf = key.rpartition(".")[2]
    return [n for n in names if n.rpartition(".")[2] == leaf] or difflib.get_close_matches(leaf, names, 1, 0.6)


def _spelt(key: str) -> str:
    key = re.sub(r"\.init_args\b", "", key)
    return f"--{key.removeprefix('trainer.')}" if key.removeprefix("trainer.").split(".")[0] in TRAINER else f"--{key}"


def _place(key: str) -> str:
    """The config file that holds the key, if it did not come as a flag."""
    leaf = re.escape(key.rpartition(".")[2])
    if any(re.match(rf"--([\w.]*\.)?{leaf}(=|\+|$)", arg) for arg in sys.argv):
        return ""
    for file in config_files(sys.argv):
        if Path(file).is_file() and re.search(
            rf"^[\s{{,-]*[\"']?{leaf}[\"']?\+?\s*:|[{{,]\s*{leaf}\s*:", Path(file).read_text(), re.M
        ):
            return f" in {file}"
    return ""


def config_files(argv: list[str]) -> list[str]:
    """The values of --config (or -c), in order."""
    found = [arg.partition("=")[2] for arg in argv if arg.startswith(("--config=", "-c="))]
    return found + [value for flag, value in itertools.pairwise(argv) if flag in ("--config", "-c")]


def check_config_file(path: str) -> None:
    """Refuse a config file that is missing or not YAML before anything else reads it.

    Raises:
        UsageError: Naming the file, and the line and column for a syntax error.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as e:
        near = difflib.get_close_matches(path, [str(p) for p in Path(path).parent.glob("*.yaml")], 1, 0.5)
        raise UsageError(f"--config {path}: {e.strerror}" + (f"; did you mean {near[0]}?" if near else ".")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"--config {path}: not a YAML file.\n" + "\n".join(str(e).splitlines()[:3])) from None
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {path}: expected sections such as `trainer:`, `model:`, `data:`, found {type(content).__name__}."
        )
