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
