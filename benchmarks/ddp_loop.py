"""What a user of torch writes by hand for two processes: its own DistributedDataParallel, rows in memory, as views.

python benchmarks/ddp_loop.py RANK STEPS LinearModel|MLP FILE      (once for each rank, with the same new FILE)
"""

import sys
import time

import torch
from torch import nn

ROWS, COLUMNS, WARM = 64, 10, 50


class MLP(nn.Module):
    """A net that has something to compute: 0.5 million weights."""

    def __init__(self, in_features: int, width: int = 512) -> None:
        super().__init__()
        blocks = [nn.Linear(in_features, width), nn.GELU()]
        for _ in range(2):
            blocks += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        self.layers = nn.Sequential(*blocks, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def main(rank: int, steps: int, net: str, file: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(MLP(COLUMNS) if net == "MLP" else nn.Linear(COLUMNS, 1))
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss()
    x, y, begun = torch.randn(steps * ROWS, COLUMNS), torch.randn(steps * ROWS, 1), 0.0
    for i, (rows, targets) in enumerate(zip(x.split(ROWS), y.split(ROWS), strict=True)):
        loss = loss_of(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i + 1 == WARM:
            begun = time.perf_counter()
    if rank == 0:
        print("rows_per_s", (steps - WARM) * ROWS * 2 / (time.perf_counter() - begun), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
