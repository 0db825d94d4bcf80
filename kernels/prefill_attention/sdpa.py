"""Dense causal attention through PyTorch's own kernels, chosen here by name and called directly, so that no call falls to math.

All of them take grouped KV heads as they are (except "efficient") and return the natural log-sum-exp. PyTorch's
is_causal is top left for Tq < Tk; only flash's own operator is bottom right.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention, can_use_flash_attention

BLOCK = 512
# earlier releases are wrong at lengths that 128 does not divide; PyTorch itself prefers cuDNN from here on
MIN_CUDNN = 91501


def backend_of(q: Tensor, k: Tensor) -> str:
    """The kernel that runs q [B, Hq, Tq, D] on k [B, Hkv, Tk, D]: "cudnn", "flash", "efficient" or "cpu"."""
    if q.device.type == "cpu":
        return "cpu"
    square = q.shape[2] == k.shape[2]
    params = SDPAParams(q, k, k, None, 0.0, square, q.shape[1] != k.shape[1])
    hopper_or_later = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    recent = (torch.backends.cudnn.version() or 0) >= MIN_CUDNN
    if square and hopper_or_later and recent and can_use_cudnn_attention(params):
        return "cudnn"
    if q.shape[3] % 8 == 0 and can_use_flash_attention(params):
        return "flash"
    repeated = SDPAParams(q, q, q, None, 0.0, square, False)
    if q.dtype == torch.float32 and square and can_use_efficient_attention(repeated):
        return "efficient"
    raise ValueError(
        f"prefill_attention: neither cuDNN nor flash runs {q.dtype}, Tq={q.shape[2]}, Tk={k.shape[2]}, D={q.shape[3]} "
        f"on {q.device} (set impl=triton or impl=reference)"
    )


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """See api.py."""
    aten = torch.ops.aten
    match backend_of(q, k):
        case "cudnn":
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, return_lse, 0.0, True, scale=scale)
            return out, lse.reshape(q.shape[:3]) if return_lse else None
        case "flash":
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
            return out, lse
        case "efficient":
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, return_lse, 0.0, True, scale=scale)
            # its rows are padded to a multiple of 32
            return out, lse[:, :, : q.shape[2]] if return_lse else None
        case _:
            return cpu_attention(q, k, v, scale)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU flash kernel; a chunk goes in blocks of queries with their own mask."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_queries == num_keys:
        return flash(q, k, v, 0.0, True, scale=scale)
    positions = torch.arange(num_keys)
    parts = []
    for start in range(0, num_queries, BLOCK):
        rows = positions[num_keys - num_queries :][start : start + BLOCK]
        mask = torch.zeros(len(rows), num_keys, dtype=q.dtype).masked_fill_(positions > rows[:, None], float("-inf"))
        parts.append(flash(q[:, :, start : start + BLOCK], k, v, 0.0, False, attn_mask=mask, scale=scale))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
