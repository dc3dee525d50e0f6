"""The nets that come along, and ``Standardise``."""

import pytest
import torch

from project.models import Generate, LinearModel, Standardise


def test_generate_gives_a_probability_for_each_row() -> None:
    out = Generate()(torch.randn(16, 5))
    assert out.shape == (16, 1)
    assert ((out > 0) & (out < 1)).all()


def test_linear_model_is_a_linear_map() -> None:
    net, x = LinearModel(10, 2), torch.randn(7, 10)
    assert torch.equal(net(x), torch.nn.functional.linear(x, net.linear.weight, net.linear.bias))


def fitted(x: torch.Tensor, *cuts: int) -> Standardise:
    layer = Standardise()
    layer.fit(Standardise.merge(Standardise.moments(torch.tensor_split(x, cuts))))
    return layer


def test_standardise_gives_mean_zero_and_variance_one_even_far_from_zero() -> None:
    x = torch.randn(1000, 3) * torch.tensor([1.0, 1e-3, 1e4]) + torch.tensor([1e3, 0.0, -1e6])
    out = fitted(x, 1, 500)(x).double()
    assert out.mean(0).abs().max() < 0.01  # the rounding of float32 inputs of 1e6
    assert out.var(0, correction=0) == pytest.approx([1, 1, 1], rel=1e-3)


def test_standardise_merges_parts_like_one_pass_and_skips_empty_ones() -> None:
    x = torch.randn(999, 4) * 5 + 100
    whole, parts = fitted(x), fitted(x, 0, 7, 7, 800)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(parts.std, whole.std, rtol=1e-6, atol=0)


def test_standardise_only_shifts_a_column_that_never_changes() -> None:
    x = torch.full((10, 1), 7.0)
    assert torch.equal(fitted(x)(x), torch.zeros(10, 1))


def test_standardise_passes_inputs_through_until_it_is_fitted_or_loaded() -> None:
    x = torch.randn(50, 2) + 3
    layer, original = Standardise(), fitted(x)
    assert torch.equal(layer(x), x)
    layer.load_state_dict(original.state_dict())
    assert layer.fitted
    assert torch.equal(layer(x), original(x))


def test_standardise_refuses_to_be_fitted_to_nothing() -> None:
    with pytest.raises(ValueError, match="no rows"):
        fitted(torch.zeros(0, 3))
