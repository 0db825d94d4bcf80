"""full: the dense cache, every token of every layer. The reference that all other rows stand beside."""

from dataclasses import dataclass

from methods.base import Method, Plan, Spec


@dataclass
class Full(Method):
    """Dense KV cache: slot = position."""

    def plan(self, spec: Spec) -> Plan:
        return self.plan_slots(spec, kept=spec.context_len, grows=True)
