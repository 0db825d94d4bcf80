"""Arrival counters: how the last program of a group knows that it is the last. Zero before and after each launch."""

import torch
from torch import Tensor

POOL = 1 << 20
_pools: dict[torch.device, Tensor] = {}
_taken: dict[torch.device, int] = {}


def take(num: int, device: torch.device) -> Tensor:
    """`num` int32 zeros that the kernel must leave at zero.

    Every call gets the next slice of a pool that wraps around: launches share a slice only when thousands of calls lie
    between them, so several streams and several CUDA graphs can run side by side.
    """
    if num > POOL:
        return torch.zeros(num, dtype=torch.int32, device=device)
    if device not in _pools:
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                # memory of a graph dies with it: this call's own zeros, cleared at every replay
                return torch.zeros(num, dtype=torch.int32, device=device)
            _pools[device] = torch.zeros(POOL, dtype=torch.int32, device=device)
            # once: another stream may take the next slice
            torch.cuda.synchronize(device)
        else:
            _pools[device] = torch.zeros(POOL, dtype=torch.int32, device=device)
        _taken[device] = 0
    start = _taken[device] if _taken[device] + num <= POOL else 0
    _taken[device] = start + num
    return _pools[device][start : start + num]
