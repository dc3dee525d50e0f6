from torch import Tensor, nn


class Generate(nn.Module):
    """A probability from five inputs: Linear(5, 1) → Sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, 5] → probabilities [N, 1]."""
        out: Tensor = self.generate(x)
        return out
