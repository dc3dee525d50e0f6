"""Going on from a checkpoint: what --resume, --ckpt_path and --init_weights ask for, settled before a run begins."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

from project.engine.resume import KEY
from project.usage import Setting, UsageError

OURS = ("config.yaml", "environment.json", "metrics.csv", "tensorboard", "checkpoints")  # what a run leaves


def folder_to_resume(command: str, typed: dict[str, Setting]) -> Path | None:
    """The run folder that ``--resume`` goes on in; None to start anew.

    Raises:
        UsageError: If there is nothing to go on from, or the flags contradict each other.
    """
    asked, run_dir = (str(typed[n].value) if n in typed else None for n in ("resume", "run_dir"))
    if asked is None:
        return None
    if command != "fit":
        raise UsageError(f"--resume goes on training; to {command}, give --ckpt_path.")
    for other in ("ckpt_path", "init_weights"):
        if other in typed:
            raise UsageError(
                f"--resume and --{other}: --resume goes on from the run's own last.ckpt; leave one of them out."
            )
    if asked == "auto" and run_dir is None:
        raise UsageError(
            "--resume auto needs --run_dir, the folder to go on in, or to start if it holds no checkpoint."
        )
    if asked != "auto" and run_dir is not None and Path(run_dir).resolve() != Path(asked).resolve():
        raise UsageError(
            f"--resume {asked} and --run_dir {run_dir}: a run goes on in its own folder; leave --run_dir out."
        )
    folder = Path(str(run_dir) if asked == "auto" else asked)
    if last_checkpoint(folder).exists() and (folder / "config.yaml").exists():
        return folder
    if asked != "auto":
        raise UsageError(
            f"--resume {asked}: no checkpoints/last.ckpt with its config.yaml there.\n"
            f"To start a run in that folder: --run_dir {asked}, or --resume auto --run_dir {asked}."
        )
    return None


def last_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def load(flag: str, path: str | Path, safe: bool = True) -> dict[str, Any]:
    """A checkpoint file; {} for a folder, in which a sharding strategy keeps one.

    Args:
        flag: The flag to name if it cannot be read.
        path: Where it is.
        safe: Only tensors and plain types; False runs whatever code the file brings.

    Raises:
        UsageError: If it is no checkpoint, or not a safe one.
    """
    if Path(path).is_dir():
        return {}
    try:
        content = torch.load(path, map_location="cpu", weights_only=safe, mmap=True)
    except pickle.UnpicklingError as e:
        reason = str(e).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or "it is no file of torch.save"
        raise UsageError(
            f"{flag} {path} is not loaded: it holds more than tensors and plain values ({reason.strip()[:200]}).\n"
            "Only if you trust who made it: --weights_only false, which runs the code it brings."
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as e:
        raise UsageError(f"{flag} {path} cannot be read as a checkpoint: {str(e).splitlines()[0][:200]}") from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise UsageError(f"{flag} {path} is not a checkpoint of Lightning: it has no state_dict.")
    return content


def check_weights(flag: str, path: str | Path, checkpoint: dict[str, Any], model: L.LightningModule) -> None:
    """Refuse weights of another model.

    Raises:
        UsageError: With the names and shapes that differ, and the config to give.
    """
    saved, now = checkpoint.get("state_dict", {}), model.state_dict()
    wrong = [f"{n} is missing" for n in now if n not in saved] + [f"{n} is not wanted" for n in saved if n not in now]
    wrong += [
        f"{n} is {list(saved[n].shape)}, not {list(now[n].shape)}"
        for n in now
        if n in saved and now[n].numel() and saved[n].shape != now[n].shape  # sizes still to be fitted fit any
    ]
    if checkpoint and wrong:
        config = Path(path).parent.parent / "config.yaml"
        known = f"--config {config}" if config.exists() else "the --config it was trained with"
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(
            f"{flag} {path} holds the weights of another model than {type(getattr(model, 'net', model)).__name__}:\n"
            f"{'; '.join(wrong[:3])}{more}.\nGive {known}."
        )


def load_weights(path: str, model: L.LightningModule, safe: bool) -> None:
    """Start from the weights of a checkpoint, and nothing else of it."""
    checkpoint = load("--init_weights", path, safe)
    check_weights("--init_weights", path, checkpoint, model)
    model.load_state_dict(checkpoint["state_dict"])


def finished(checkpoint: dict[str, Any], trainer: L.Trainer, changed: bool) -> bool:
    """Whether the run that wrote the checkpoint has done all that the limits in force ask for.

    One that EarlyStopping ended is finished too, until a setting is ``changed``.
    """
    state = checkpoint.get(KEY)
    if state is None or state["validation_due"]:
        return False
    if state.get("stopped_early") and not changed:
        return True
    epochs = state["epoch"] + (1 if state["epoch_done"] and state["rows"] else 0)
    steps_over = 0 <= trainer.max_steps <= checkpoint["global_step"]
    return steps_over or (trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs)


def settle_optimizer(config: Any, typed: Callable[[str], bool], checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Flag > file > checkpoint > default for each value of the optimizer.

    Values that were not typed are set in ``config`` to those of the checkpoint: the saved config shows what was used.

    Returns:
        The typed values that differ from the checkpoint's, to put in their place once it is restored.
    """
    states = checkpoint.get("optimizer_states") or []
    if not states or config.optimizer.get("init_args") is None:
        return {}
    group, replaced = states[0]["param_groups"][0], {}
    for name, value in config.optimizer.init_args.as_dict().items():
        saved = group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name, value)
        if saved == value or isinstance(saved, torch.Tensor):
            continue
        if typed(f"optimizer.{name}"):
            replaced[name] = value
        else:
            config.optimizer.init_args[name] = saved
    return replaced


def changes(before: str, now: str) -> Iterator[str]:
    """Each setting that differs between two configs, as "name: saved → now"."""
    was, new = (dict(_flat(yaml.safe_load(text) or {})) for text in (before, now))
    for name in sorted({*was, *new}):
        if was.get(name) != new.get(name):
            yield f"{name.replace('.init_args', '')}: {was.get(name)} → {new.get(name)}"


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, value
