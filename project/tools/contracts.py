"""Tests to inherit: what any module and any source must do. Three lines in a test file of yours::

class TestMyNet(ModelContract):
    module = staticmethod(lambda: Module(MyNet(in_features=10)))
    source = SyntheticSource(rows=64, features=10)

class TestMySource(SourceContract):
    source = staticmethod(lambda: MySource("data/my.csv"))
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from project.data.datamodule import StreamDataModule
from project.data.order import Part, RowOrder
from project.data.sources import Source
from project.data.stream import Chunks, Shares
from project.engine.resume import Resume
from project.module import Module
from project.usage import UsageError

ROWS = 32


class ModelContract:
    """A module that learns from a source.

    Attributes:
        module: Makes the module, with fresh weights.
        source: Rows to learn from, at least 64.
        tolerance: How far predictions may differ with the number of rows in a call, and between devices.
    """

    module: Callable[[], Module]
    source: Source
    tolerance = 1e-5

    def _fresh(self) -> Module:
        L.seed_everything(0)
        return type(self).module()

    def _batch(self, rows: int = ROWS) -> tuple[Tensor, ...]:
        return self.source.read(torch.arange(rows))

    def _loss(self, module: Module, batch: tuple[Tensor, ...]) -> Tensor:
        return module.compute_loss(module(batch[0]), batch[1])

    def test_a_step_lowers_the_loss(self) -> None:
        module, batch = self._fresh().eval(), self._batch()
        before = self._loss(module, batch)
        before.backward()  # type: ignore[no-untyped-call]
        steepest = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
        assert steepest > 0, "no parameter has a gradient"
        rate = 1e-3 * float(before.detach()) / steepest  # small enough that the loss falls by about a thousandth
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p.sub_(rate * p.grad)
        assert self._loss(module, batch) < before, "a small step down the gradient raised the loss"

    def test_gradients_reach_every_parameter(self) -> None:
        module = self._fresh()
        self._loss(module, self._batch()).backward()  # type: ignore[no-untyped-call]
        silent = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        assert not silent, f"no gradient reaches {', '.join(silent)}"

    def test_a_prediction_does_not_depend_on_its_batch(self) -> None:
        module, x = self._fresh().eval(), self._batch()[0]
        with torch.no_grad():
            whole, parts = module(x), torch.cat([module(x[:1]), module(x[1:8]), module(x[8:])])
        assert torch.allclose(whole, parts, rtol=self.tolerance, atol=self.tolerance), "it changes"

    def test_saved_weights_load_safely_and_predict_the_same(self, tmp_path: Path) -> None:
        module, other, x = self._fresh().eval(), type(self).module().eval(), self._batch()[0]
        torch.save(module.state_dict(), tmp_path / "weights.pt")
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        with torch.no_grad():
            assert torch.equal(module(x), other(x))

    def test_another_device_predicts_the_same(self) -> None:
        if not torch.accelerator.is_available():
            return
        device = torch.accelerator.current_accelerator()  # pragma: cuda
        module, x = self._fresh().eval(), self._batch()[0]  # pragma: cuda
        with torch.no_grad():  # pragma: cuda
            there = copy.deepcopy(module).to(device)(x.to(device)).cpu()
            assert torch.allclose(module(x), there, rtol=self.tolerance, atol=self.tolerance)

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["torch_export", "onnx"])
    def test_an_export_predicts_the_same(self, form: str, tmp_path: Path) -> None:
        tool = pytest.importorskip("project.tools.export")  # which may have been deleted
        try:
            tool.export(self._fresh(), self._batch(7)[0], form, tmp_path / "net")
        except UsageError as e:  # a package that is missing
            if e.code == 1:
                raise
            pytest.skip(str(e))

    def test_training_resumes_as_if_never_stopped(self, tmp_path: Path) -> None:
        whole = self._train(4)
        half = self._train(2)
        half.save_checkpoint(tmp_path / "half.ckpt")
        again = self._train(4, tmp_path / "half.ckpt")
        for (name, a), b in zip(whole.model.state_dict().items(), again.model.state_dict().values(), strict=True):  # type: ignore[union-attr]
            assert torch.equal(a, b), f"{name} differs after a resume"

    def _train(self, steps: int, ckpt: Path | None = None) -> L.Trainer:
        module = self._fresh()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Resume()],
        )
        data = StreamDataModule(self.source, split=(1.0, 0.0, 0.0), batch_size=max(1, len(self.source) // 3))
        trainer.fit(module, data, ckpt_path=ckpt, weights_only=True)
        return trainer


class SourceContract:
    """A source of rows.

    Attributes:
        source: Makes the source.
    """

    source: Callable[[], Any]

    def _rows(self) -> tuple[Any, Tensor]:
        source = type(self).source()
        return source, torch.arange(min(len(source), ROWS))

    def test_it_has_a_length_and_rows(self) -> None:
        source, rows = self._rows()
        assert isinstance(len(source), int)
        assert len(source) > 0
        read = source.read(rows)
        assert isinstance(read, tuple), "read must return a tuple of tensors"
        for tensor in read:
            assert isinstance(tensor, Tensor), f"read must return tensors; found {type(tensor).__name__}"
            assert len(tensor) == len(rows), f"asked for {len(rows)} rows, got {len(tensor)}"
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), "values that are not finite"

    def test_any_rows_in_any_order_with_repeats(self) -> None:
        source, rows = self._rows()
        whole = source.read(rows)
        asked = torch.cat([rows.flip(0), rows[:1], rows[-1:]])
        for a, b in zip(whole, source.read(asked), strict=True):
            assert torch.equal(a[asked], b), "row i of the result must be row rows[i]"
        for a, b in zip(whole, source.read(rows[:0]), strict=True):
            assert b.shape == (0, *a.shape[1:]), "no rows must give tensors of no rows"

    def test_a_row_is_always_the_same(self) -> None:
        source, rows = self._rows()
        again, _ = self._rows()
        for a, b, c in zip(source.read(rows), source.read(rows), again.read(rows), strict=True):
            assert torch.equal(a, b), "a second read gives other values"
            assert torch.equal(a, c), "a second source gives other values"

    def test_dtype_and_shape_do_not_depend_on_the_rows(self) -> None:
        source, rows = self._rows()
        for a, b in zip(source.read(rows), source.read(rows[-1:]), strict=True):
            assert (a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:])
        stated = getattr(source, "in_features", None)
        assert stated in (None, source.read(rows)[0].shape[-1]), "in_features is not the number of columns"

    def test_it_travels_to_spawned_workers(self) -> None:
        source, rows = self._rows()
        expected = source.read(rows)
        for a, b in zip(expected, pickle.loads(pickle.dumps(source)).read(rows), strict=True):
            assert torch.equal(a, b)
        n = len(rows)
        chunks = Chunks(source, Part(n, 0.0, 1.0), RowOrder(n, shuffle=False), Shares(0, n, n), pad=False)
        loader = DataLoader(
            chunks, batch_size=None, sampler=[(0, 0, 1)], num_workers=1, multiprocessing_context="spawn"
        )
        for a, b in zip(expected, next(iter(loader)), strict=True):
            assert torch.equal(a, b)

    def test_the_shares_of_ranks_hold_each_row_once(self) -> None:
        source, _ = self._rows()
        n = len(source)
        for world in (1, 2, 3):
            seen = []
            for rank in range(world):
                order, shares = RowOrder(n, block=getattr(source, "block", None)), Shares(0, n, 8, world, rank)
                chunks = Chunks(source, Part(n, 0.0, 1.0), order, shares, pad=False)
                seen.append(chunks.rows(0, 0, len(shares)))
            assert torch.equal(torch.cat(seen).sort().values, torch.arange(n)), f"not each row once at {world} ranks"
