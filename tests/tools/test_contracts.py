"""The contracts hold for what we ship, and fail for what breaks them."""

import numpy as np
import pytest
import torch
from torch import nn

from project.data.sources import ArraySource, Source, SyntheticSource
from project.data.tables import TableSource
from project.models import Generate, LinearModel
from project.module import Module
from project.tools.contracts import ModelContract, SourceContract
from project.usage import Failed


class TestLinearModel(ModelContract):
    module = staticmethod(lambda: Module(LinearModel(10, 1)))
    source = SyntheticSource(rows=96, features=10)


class TestGenerate(ModelContract):
    module = staticmethod(lambda: Module(Generate(), loss=nn.BCELoss()))
    source = SyntheticSource(rows=96, features=5, kind="binary")


class TestWithDropout(ModelContract):
    module = staticmethod(lambda: Module(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))))
    source = SyntheticSource(rows=96, features=5)


class TestSyntheticSource(SourceContract):
    source = staticmethod(lambda: SyntheticSource(rows=101, features=3))


class TestTableSource(SourceContract):
    source = staticmethod(lambda: TableSource("data/diabetes.csv", target="target"))


class TestArraySource(SourceContract):
    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        np.save(tmp_path / "x.npy", np.arange(303.0).reshape(101, 3))
        np.save(tmp_path / "y.npy", np.arange(101))
        type(self).source = staticmethod(lambda: ArraySource(str(tmp_path / "x.npy"), str(tmp_path / "y.npy")))


class Drifts(Source):
    """Gives other values at every read."""

    def __len__(self):
        return 50

    def read(self, rows):
        return (torch.rand(len(rows), 2),)


class Sorts(Source):
    """Gives rows in its own order instead of the order asked for."""

    def __len__(self):
        return 50

    def read(self, rows):
        return (rows.sort().values[:, None].float(),)


@pytest.mark.parametrize(
    ("broken", "test"),
    [(Drifts, "test_a_row_is_always_the_same"), (Sorts, "test_any_rows_in_any_order_with_repeats")],
)
def test_a_broken_source_fails(broken, test):
    contract = type("Contract", (SourceContract,), {"source": staticmethod(broken)})()
    with pytest.raises(AssertionError):
        getattr(contract, test)()


class Dead(nn.Module):
    """A layer that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x):
        return self.used(x)


class Peeks(nn.Module):
    """Predictions that depend on the other rows of the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x - x.mean(0))


@pytest.mark.parametrize(
    ("net", "test"),
    [(Dead, "test_gradients_reach_every_parameter"), (Peeks, "test_a_prediction_does_not_depend_on_its_batch")],
)
def test_a_broken_model_fails(net, test):
    parts = {"module": staticmethod(lambda: Module(net())), "source": SyntheticSource(rows=96, features=5)}
    with pytest.raises(AssertionError):
        getattr(type("Contract", (ModelContract,), parts)(), test)()


class Forks(nn.Linear):
    """Goes two ways by a value: no graph can hold both."""

    def __init__(self):
        super().__init__(5, 1)

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x[:, :1]


@pytest.mark.slow
def test_a_net_that_cannot_be_exported_fails(tmp_path):
    parts = {"module": staticmethod(lambda: Module(Forks())), "source": SyntheticSource(rows=96, features=5)}
    with pytest.raises(Failed, match="Forks cannot be exported as torch_export: GuardOnDataDependentSymNode"):
        type("Contract", (ModelContract,), parts)().test_an_export_predicts_the_same("torch_export", tmp_path)
    assert list(tmp_path.iterdir()) == []
