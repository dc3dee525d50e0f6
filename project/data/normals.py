"""Standard normals as a pure function of a counter: any row of synthetic data, on any device, without a state."""

import math

import torch
from torch import Tensor

GOLDEN, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of splitmix64
ALIGN = 64  # blocks hold a multiple of this many rows: whole vector registers, so no row meets a scalar tail's rounding
CPU_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 22  # pairs a block: within the processor's cache; few launches elsewhere
CPU_ROWS = 32_704  # rows a block: below the length at which torch cuts a vector between threads, at any place


def signed(value: int) -> int:
    """The 64 low bits of an integer as torch.int64 holds them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def splitmix64(value: int) -> int:
    """One step of the splitmix64 generator from state `value`; `Normals` does the same to tensors."""
    z = (value + GOLDEN) % (1 << 64)
    for shift, factor in ((30, MIX_A), (27, MIX_B), (31, 1)):
        z = (z ^ (z >> shift)) * factor % (1 << 64)
    return z


class Normals:
    """Turns counters into normals within buffers that are made once: fresh memory would cost page faults."""

    def __init__(self, pairs: int, n: int, device: torch.device) -> None:
        size = pairs * n
        self.state, self.other = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
        self.bits, self.out = self.state.new_empty(size, dtype=torch.int32), torch.empty(2 * size, device=device)
        self.base, self.half = self.state.new_empty(n), torch.tensor(2.0**-32, device=device)

    def draw(self, base: Tensor, steps: Tensor, count: int) -> Tensor:
        """int64 [n] and [pairs, 1] → float32 [count, n]: two standard normals of each splitmix64(base + step).

        int64 wraps as uint64 does, but its shifts copy the sign: masked, or read where they leave no trace. The upper
        31 bits make the radius (tails to 6.6), the lower 32 the angle; by int32 and float32, which all devices have.
        """
        pairs, n = len(steps), len(base)
        z, t, bits = (buffer[: pairs * n].view(pairs, n) for buffer in (self.state, self.other, self.bits))
        out, radius = self.out[: count * n].view(count, n), self.other.view(torch.float32)[: pairs * n].view(pairs, n)
        cos, sin = out[:pairs], out[pairs:]
        torch.add(base, steps, out=z)
        for shift, factor in ((30, MIX_A), (27, MIX_B)):
            torch.bitwise_right_shift(z, shift, out=t)
            z.bitwise_xor_(t.bitwise_and_((1 << (64 - shift)) - 1)).mul_(signed(factor))
        bits.copy_(torch.bitwise_right_shift(z, 33, out=t)).bitwise_and_((1 << 31) - 1)
        z.bitwise_xor_(torch.bitwise_right_shift(z, 31, out=t))
        radius.copy_(bits)  # in the memory of t
        torch.add(self.half, radius, alpha=2.0**-31, out=radius)
        radius.log2_().mul_(-2.0 * math.log(2.0)).sqrt_()  # faster than log
        cos.copy_(bits.copy_(z)).mul_(math.pi * 2.0**-31)
        torch.sin(cos[: count - pairs], out=sin).mul_(radius[: count - pairs])
        cos.cos_().mul_(radius)
        return out
