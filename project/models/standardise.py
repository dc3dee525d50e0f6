from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Moments = tuple[int, Tensor, Tensor]  # rows, mean [C], sum of squared deviations [C]; both float64


class Standardise(nn.Module):
    """Inputs to zero mean and unit variance, by numbers that are fitted once to the training rows.

    Mean and standard deviation are buffers, so checkpoints, predictions and exports carry them; until they are fitted,
    or loaded, inputs pass unchanged.
    """

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(0))
        self.register_buffer("std", torch.zeros(0))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The number of columns is known only from what was fitted: take the sizes from the checkpoint."""
        for name in ("mean", "std"):
            if prefix + name in state_dict:
                setattr(self, name, getattr(self, name).new_empty(state_dict[prefix + name].shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def fitted(self) -> bool:
        return self.mean.numel() > 0

    @staticmethod
    def moments(batches: Iterable[Tensor]) -> list[Moments]:
        """Rows, mean and squared deviations of each batch [N, C], in float64 on the CPU."""
        parts = []
        for x in batches:
            x = x.double().cpu()
            mean = x.mean(0)
            parts.append((len(x), mean, (x - mean).square_().sum(0)))
        return parts

    @staticmethod
    def merge(parts: Iterable[Moments]) -> Moments:
        """Moments of all parts together, merged in the order given (Chan, Golub and LeVeque, 1979)."""
        rows, mean, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for n, m, s in parts:
            if n:
                delta, total = m - mean, rows + n
                squares = squares + s + delta.square() * (rows * n / total)
                mean = mean + delta * (n / total)
                rows = total
        return rows, mean, squares

    def fit(self, moments: Moments) -> None:
        """Keep the mean and standard deviation [C]; a column that never changes is only shifted.

        Raises:
            ValueError: Without a row.
        """
        rows, mean, squares = moments
        if not rows:
            raise ValueError("Standardise: no rows to fit.")
        std = (squares / rows).sqrt()
        std = torch.where(std > 0, std, 1.0)
        self.mean, self.std = mean.to(self.mean), std.to(self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, C] → standardised inputs [N, C]."""
        return (x - self.mean) / self.std if self.fitted else x
