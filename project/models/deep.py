import itertools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


class Deep(nn.Module):
    """Layers of one width, for nets that do not fit on one device: ``--strategy model_parallel`` shards it.

    Args:
        in_features: Number of input columns; from the command line it follows from the data.
        width: Outputs of each hidden layer.
        depth: Number of hidden layers.
        out_features: Number of outputs.
    """

    def __init__(self, in_features: int, width: int = 64, depth: int = 4, out_features: int = 1) -> None:
        super().__init__()
        sizes = [in_features, *[width] * depth]
        self.hidden = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(width, out_features)

    def shard(self, mesh: DeviceMesh) -> None:
        """Leave each process a part of every layer; a layer is whole only while it computes."""
        for layer in self.hidden:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, in_features] → outputs [N, out_features]."""
        for layer in self.hidden:
            x = layer(x)
        out: Tensor = self.out(x)
        return out
