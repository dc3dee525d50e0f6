"""A trained net as one file that needs no training code: ``python -m project.tools.export RUN_DIR --format onnx``."""

import argparse
import contextlib
import copy
import json
import logging
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from project.cli import CLI
from project.mistakes import in_words, unwrapped
from project.module import Module
from project.resuming import load
from project.summary import quiet
from project.usage import Failed, UsageError

TOLERANCE = 1e-5  # absolute, and relative for values above 1
Run = Callable[[Tensor], Tensor]


def _onnx(net: nn.Module, x: Tensor, path: Path, about: dict[str, str]) -> Run:
    import onnxruntime

    options: dict[str, Any] = {"input_names": ["input"], "output_names": ["prediction"], "external_data": False}
    torch.onnx.export(net, (x,), str(path), dynamo=True, dynamic_shapes=_free_batch(), verbose=False, **options)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def _torch_export(net: nn.Module, x: Tensor, path: Path, about: dict[str, str]) -> Run:
    program = torch.export.export(net, (x,), dynamic_shapes=_free_batch())
    with open(path, "w+b") as file:  # given a name, it insists on an ending
        torch.export.save(program, file)
        file.seek(0)
        run: Run = torch.export.load(file).module()
    return run


def _safetensors(net: nn.Module, x: Tensor, path: Path, about: dict[str, str]) -> Run:
    from safetensors.torch import load_model, save_model

    save_model(net, str(path), about)
    again = copy.deepcopy(net)
    for tensor in again.state_dict().values():
        tensor.zero_()  # so that what is compared comes from the file
    load_model(again, str(path))
    return again


def _free_batch() -> Any:
    return ({0: torch.export.Dim("batch")},)


FORMATS: dict[str, tuple[str, tuple[str, ...], Callable[[nn.Module, Tensor, Path, dict[str, str]], Run]]] = {
    "onnx": (".onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx),
    "torch_export": (".pt2", (), _torch_export),
    "safetensors": (".safetensors", ("safetensors",), _safetensors),
}


def export(module: nn.Module, x: Tensor, form: str, path: Path, about: dict[str, str] | None = None) -> float:
    """Write what ``module`` computes, read it back, and compare the two at batches of 1 and 7 rows.

    Args:
        module: A trained module, on the CPU; put into evaluation mode. A Module's standardisation goes along.
        x: Inputs [7, ...]; the number of rows stays free.
        form: "onnx", "torch_export", or "safetensors": the weights, under their names in a checkpoint.
        path: The file; it appears only if the comparison holds.
        about: Kept in the header of a safetensors file.

    Returns:
        The largest difference found.

    Raises:
        UsageError: If a package is missing.
        Failed: If the module cannot be exported, or the file computes something else.
    """
    _, packages, write = FORMATS[form]
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise UsageError(f"--format {form} needs {package}: pip install {' '.join(packages)}") from None
    net, unfinished, worst = module.eval(), path.with_name(path.name + ".tmp"), 0.0
    if isinstance(module, Module) and type(module).forward is Module.forward:  # its parts alone, without Lightning
        parts = {"standardise": module.standardise, "net": module.net}
        net = nn.Sequential(OrderedDict((name, part) for name, part in parts.items() if part is not None))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists packages that nobody asked for
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), torch.no_grad():
            warnings.simplefilter("ignore")
            run = write(net.eval(), x[:2], unfinished, about or {})
            for expected, found in ((module(rows), run(rows)) for rows in (x[:1], x[:7])):
                worst = max(worst, float((expected - found).abs().max()))
                if expected.shape != found.shape or not torch.allclose(expected, found, TOLERANCE, TOLERANCE):
                    raise ArithmeticError(f"at {len(expected)} rows the file differs from the module by {worst:.2g}")
        os.replace(unfinished, path)
    except Exception as e:  # exporters raise many types, with pages of text
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise Failed(f"{type(getattr(module, 'net', module)).__name__} cannot be exported as {form}: {reason}") from e
    finally:
        unfinished.unlink(missing_ok=True)
    return worst


class Rebuilt(CLI):
    """Model, weights and data of a run, from its saved config and a checkpoint, without a Trainer.

    Raises:
        UsageError: If there is no such run or checkpoint, or its weights are not those of the model.
    """

    def __init__(self, folder: Path, ckpt_path: str = "best", safe: bool = True) -> None:
        if not (folder / "config.yaml").is_file():
            raise UsageError(f"{folder}: no config.yaml there; expected the run folder of a training run.")
        last = folder / "checkpoints" / "last.ckpt"
        saved = load("--ckpt_path", last, safe) if ckpt_path == "best" and last.is_file() else {}
        best = [last.with_name(n) for n in saved.get("callbacks", {}).get("Checkpoints", {}).get("best", {})]
        self.path = (
            next((str(p) for p in best if p.exists()), str(last)) if ckpt_path in ("best", "last") else ckpt_path
        )
        self.checkpoint = load("--ckpt_path", self.path, safe)
        if not self.checkpoint:
            raise UsageError(f"--ckpt_path {self.path}: a folder, of a sharded run; export needs a file.")
        unused = [f"--{name}=null" for name in ("logger", "callbacks", "profiler", "plugins")]
        super().__init__(["predict", "--config", str(folder / "config.yaml"), *unused])
        self.model.load_state_dict(self.checkpoint["state_dict"])

    def before_instantiate_classes(self) -> None:
        """Nothing to settle: nothing will run."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def inputs(self) -> Tensor:
        """Inputs [7, ...] from the run's data: they tell the shape and type of what the net takes."""
        source: Any = getattr(self.datamodule, "source", None)
        if source is None:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            batch: Any = next(iter(self.datamodule.train_dataloader()))
        else:
            batch = source.read(torch.arange(min(7, len(source))))
        x: Tensor = batch if isinstance(batch, Tensor) else batch[0]
        return x[torch.arange(7) % len(x)]


def main(argv: list[str] | None = None) -> None:
    """Exit codes: 0 exported; 1 it cannot be; 2 wrong use, nothing written."""
    parser = argparse.ArgumentParser("python -m project.tools.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="the run folder; its config.yaml is trusted like code")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", type=Path, help="the file; default: RUN_DIR/model.onnx, .pt2 or .safetensors")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    parser.add_argument("--ckpt_path", default="best", help="best (default; last if there is none), last, or a file")
    parser.add_argument("--weights_only", choices=("true", "false"), default="true", help="false trusts the checkpoint")
    asked = parser.parse_args(argv)
    quiet()
    try:
        path = asked.output or asked.run_dir / f"model{FORMATS[asked.format][0]}"
        if path.exists() and not asked.overwrite:
            raise UsageError(f"{path} exists; choose another name with --output, or --overwrite it.")
        run = Rebuilt(asked.run_dir, asked.ckpt_path, asked.weights_only == "true")
        x = run.inputs()
        about = {"model": json.dumps(run.config.model.as_dict(), default=str), "input": json.dumps(x.shape[1:])}
        worst = export(run.model, x, asked.format, path, about)
        print(f"exported    {path}: optimizer step {run.checkpoint['global_step']:,} of {run.path}")
        print(f"compared    with the module at batches of 1 and 7 rows: largest difference {worst:.2g}")
    except Exception as wrapped:
        e = unwrapped(wrapped)
        if not isinstance(e, UsageError | OSError) and not in_words(e):
            raise
        print(f"export: error: {e}", file=sys.stderr)
        sys.exit(getattr(e, "code", 2))


if __name__ == "__main__":
    main()
