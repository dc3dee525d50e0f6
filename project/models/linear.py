from torch import Tensor, nn


class LinearModel(nn.Module):
    """A linear map.

    Args:
        in_features: Number of input columns; from the command line it follows from the data.
        out_features: Number of outputs.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, in_features] → outputs [N, out_features]."""
        out: Tensor = self.linear(x)
        return out
