"""Shared ops of all methods: one folder per op with api.py (checks once, picks the implementation) and reference.py (PyTorch, the oracle).

Layouts: queries [B, Hq, T, D] (decode: [B, Hq, D]); slots [B, Hkv, C, D]; lengths [B]. KV heads are never repeated.
`impl` names the implementation; one that cannot run is an error, nothing falls back in silence.
"""

IMPLS = ("reference",)


def unknown_impl(op: str, impl: str) -> ValueError:
    """Error for an implementation that this op does not have."""
    return ValueError(f"{op} has no implementation {impl!r}; it has: {', '.join(IMPLS)} (set impl={IMPLS[0]})")
