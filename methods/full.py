"""full: the dense cache, every token of every layer. The reference that all other rows stand beside."""

from dataclasses import dataclass

from methods.base import Method, Plan, Spec
from methods.slots import DTYPES


@dataclass
class Full(Method):
    """Dense KV cache: slot = position."""

    @property
    def memory_class(self) -> str:
        """A quantised cache frees bytes too."""
        return "none" if self.kv_dtype in ("auto", *DTYPES) else "freed"

    def plan(self, spec: Spec) -> Plan:
        return self.plan_slots(spec, kept=spec.context_len, grows=True)

    def require_dtype(self, kv_dtype: str) -> None:
        """ValueError unless it stores `kv_dtype`, which the methods named after one do."""
        if self.kv_dtype != kv_dtype:
            raise ValueError(
                f"method={kv_dtype} stores {kv_dtype}, not {self.kv_dtype}; use method=full kv_dtype={self.kv_dtype}"
            )
