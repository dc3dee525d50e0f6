"""Mistakes in words: the key as it was typed, the file it stands in, what was expected, the nearest valid name."""

import difflib
import re
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from project.engine.disk import refused
from project.usage import (
    DEFAULT_CLASSES,
    SHORT_NAMES,
    TRAINER,
    Failed,
    Setting,
    UsageError,
    class_at,
    find_class,
    parameters,
    short,
)

if TYPE_CHECKING:
    from project.usage import Parser

# Names that people know from elsewhere, too far from ours for a comparison of letters.
KNOWN_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "output_dir": "run_dir",
    "save_dir": "run_dir",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "seed": "seed_everything",
    "gpus": "trainer.devices",
}


def check_config_file(path: str, sections: set[str]) -> None:
    """Refuse a config file that is missing, not YAML, or not in sections, before anything else reads it."""
    text = ""
    try:
        text = Path(path).read_text()
        content = yaml.safe_load(text)
    except OSError as e:
        near = difflib.get_close_matches(path, [str(p) for p in Path(path).parent.glob("*.y*ml")], 1, 0.5)
        raise UsageError(f"--config {path}: {e.strerror}" + (f"; did you mean {near[0]}?" if near else ".")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        mark = getattr(e, "problem_mark", None)  # where it went wrong; the text begins with where it had begun
        where = f", line {mark.line + 1}, column {mark.column + 1}: {getattr(e, 'problem', '')}" if mark else f": {e}"
        line = "\n  " + text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        raise UsageError(f"--config {path}: not a YAML file{where}{line}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise UsageError(f"--config {path}: expected sections such as trainer:, model:, data:; found {found}.")
    for name in sections & content.keys():
        if not isinstance(content[name], dict | str):
            found = "nothing" if content[name] is None else content[name]
            raise UsageError(f"{name} in {path}: expected settings by name under it; found {found}.")


def explain(message: str, parser: "Parser") -> str:
    """jsonargparse's message, which shows all of a nested configuration, in at most five lines."""
    typed, names = parser.typed, _names(parser)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message.replace("typing.", ""))
    text = re.sub(r"\. Got value.*", "", text)
    parents = re.findall(r'[Pp]arser key "([\w.]+)"', text)
    group = re.findall(r"Group '([\w.]+)' does not", text)
    if unknown := re.search(r"(?:accept option|Option) '([\w.+]+)'|nrecognized arguments: (--[\w.+-]+)", text):
        name = (unknown[1] or unknown[2]).lstrip("-")
        key = _full_key([*group, *parents], name, typed, names)
        if name.startswith("init_args."):
            return f"{_place(key, typed)}: stands one init_args too deep."
        return f"{_place(key, typed)}: no such setting{_did_you_mean(key, typed, names)}"
    if word := re.search(r"nrecognized arguments: (\S+)", text):
        return f"{word[1]}: expected a flag such as --max_epochs 3; the command (fit, validate, …) comes first."
    if flag := re.search(r"argument (--[\w.]+): expected", text):
        return f"--{short(flag[1][2:])}: expected a value after it."
    if missing := re.search(r"arguments are required: ([\w., ]+)", text):
        lacking = [name.strip() for name in missing[1].split(",")]
        owner = re.findall(r"Problem with given class_path '([\w.]+)'", text)[-1:]
        of_class = (k for k, s in typed.items() if s.value in owner or _lacks(k, lacking, typed))
        place = next((k for k in of_class if k.startswith(tuple(parents))), "".join(parents[:1])).removesuffix(
            ".class_path"
        )
        if place in typed and typed[place].file:
            return f"{_place(place, typed, True)}: also needs init_args: {{{', '.join(f'{n}: …' for n in lacking)}}}"
        return f"{_place(place, typed, True)}: also needs " + ", ".join(f"--{short(place)}.{name}" for name in lacking)
    if not parents:
        return "\n".join([line for line in text.splitlines() if line.strip()][:5])
    key = _full_key(parents[:-1], parents[-1], typed, set())
    if isinstance(typed.get(key, Setting("", "")).value, dict):  # the parser does not say which class within it
        key = next((k for k, s in typed.items() if k.startswith(key) and _not_found(s.value)), key)
    at, value = _place(key, typed, True), str(typed[key].value) if key in typed else ""
    if reasons := re.findall(r"No module named .*|module '.*' has no attribute .*|invalid syntax.*", text):
        return f"{at}: {reasons[-1].rstrip('.')}{_near_class(value)}"
    if wrong := re.search(r"not (?:correspond to )?a (?:valid )?subclass of (\w+)", text):
        return f"{at}: expected a class of {wrong[1]}."
    if _not_found(value):  # a file of the user's that fails on import
        return f"{at}: cannot be imported: {_import_error(value)}"
    expected = re.findall(r"Expected an? (?!NoneType|path|dot import)(.*)", text)
    if "dot import path" in text and expected in ([], ["list"]):
        return f"{at}: no such class{_near_class(value)}"
    words = " or ".join(dict.fromkeys(re.sub(r"Literal\[(.*)\]", r"one of \1", e) for e in expected))
    return f"{at}: expected {words or 'another value'}."[:600]


def in_words(e: BaseException) -> bool:
    """Whether an error was raised, by us or by Lightning, to tell a user of a mistake; any other is a bug to trace.

    Models and sources of the user's may stand among our files: only a ``raise`` of a ValueError counts.
    """
    where = traceback.extract_tb(e.__traceback__)[-1]
    if isinstance(e, RuntimeError) and where.filename.endswith("early_stopping.py"):  # a score that is not there
        return True
    ours = re.search(r"[/\\](project|lightning)[/\\]", where.filename)
    return (
        isinstance(e, ValueError | MisconfigurationException | ModuleNotFoundError)  # the last: a logger's package
        and bool(ours)
        and (where.line or "").startswith("raise")
    )


def unwrapped(e: Exception, folder: Path | None = None) -> Exception:
    """The error itself: jsonargparse puts it in a listing of the configuration, torch in a text from a data worker.

    What a disk refused to write in the run ``folder`` is put in words.
    """
    if folder is not None and (full := refused(e, folder)):
        return full
    while isinstance(e.__cause__, Exception) and "jsonargparse" in traceback.extract_tb(e.__traceback__)[-1].filename:
        e = e.__cause__
    ours = r"Caught ValueError in DataLoader worker .*[/\\]project[/\\][^\n]*\n +raise .*?\nValueError: (.*)"
    if found := re.match(ours, str(e), re.S):
        return Failed(found[1].strip())
    return e


# ---- names


def _names(parser: "Parser") -> set[str]:
    """Every key that is valid here, given the classes that were chosen."""
    names = {o.lstrip("-") for a in parser._actions for o in a.option_strings if o.startswith("--")}
    for key in {*parser.typed, *DEFAULT_CLASSES}:
        if cls := class_at(key, parser.typed):
            names |= {f"{key}.{name}" for name, *_ in parameters(cls)} | {f"{key}.class_path"}
    return {n for n in names if not n.endswith((".help", "+"))}


def _full_key(parents: list[str], leaf: str, typed: dict[str, Setting], valid: set[str]) -> str:
    """The key as it was typed: the parser tells only its two ends."""
    exact = ".".join([*parents[:1], leaf])
    leaf = re.sub(r"\binit_args\.", "", leaf)
    ends = [k for k in typed if (k == leaf or k.endswith(f".{leaf}")) and k.startswith("".join(parents[:1]))]
    return next((k for k in ends if k == exact or k not in valid), ends[-1] if ends else exact)


def _did_you_mean(key: str, typed: dict[str, Setting], names: set[str]) -> str:
    """The nearest name: a sibling in letters, or the same or a similar name elsewhere."""
    parent, _, leaf = key.rpartition(".")
    elsewhere = {n.rpartition(".")[2]: n for n in sorted(names, key=lambda n: (-n.count("."), n))}
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    known: dict[str, str] = {}
    if not parent:
        known, siblings = KNOWN_ELSEWHERE, {n: f"trainer.{n}" for n in TRAINER} | siblings
    for candidates, alike in ((known, 0.85), (siblings, 0.75), (elsewhere, 0.8), (siblings, 0.6)):
        for near in difflib.get_close_matches(leaf, candidates, 1, alike):
            in_file = key in typed and typed[key].file
            return f"; did you mean {candidates[near] if in_file else '--' + short(candidates[near])}?"
    if own := sorted(siblings.keys() - {"class_path", "params"}):
        return f"; {parent} has {', '.join(own[:12])}{', …' if own[12:] else ''}."
    return "; see --help."


def _near_class(path: str) -> str:
    module, _, name = path.rpartition(".")
    found: list[str] = []
    for place in [module] if module else SHORT_NAMES:
        try:
            found += [n for n, v in vars(import_module(place)).items() if isinstance(v, type)]
        except Exception:  # no such module: nothing to compare with
            continue
    near = difflib.get_close_matches(name, found, 1, 0.6)
    return f"; did you mean {module}{'.' if module else ''}{near[0]}?" if near else "."


def _not_found(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[a-zA-Z_][\w.]*\.\w+", value)) and find_class(value) is None


def _import_error(path: str) -> str:
    try:
        import_module(path.rpartition(".")[0])
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__}: {e} ({where.filename}, line {where.lineno})"
    return "no such class"


def _lacks(key: str, names: list[str], typed: dict[str, Setting]) -> bool:
    cls = class_at(key, typed)
    own = {name for name, *_ in parameters(cls)} if cls else set()
    return all(name in own and f"{key}.{name}" not in typed for name in names)


def _place(key: str, typed: dict[str, Setting], value: bool = False) -> str:
    """The key as a person typed it, with its value if that matters: a flag, or a name in a file."""
    setting = typed.get(f"{key}.class_path", typed.get(key, Setting("", "")))
    shown, file = str(setting.value)[:80] if value else "", setting.file
    return f"{key}: {shown} in {file}".replace(":  in", " in") if file else f"--{short(key)} {shown}".strip()
