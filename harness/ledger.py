"""The ledger: bytes of the storages that a method really holds, compared with what it predicted.

Every tensor that can be reached from the method and its layers counts with its whole storage, once, whether the method declares
it or not. So a view that keeps a large storage alive, a forgotten dense copy and an undeclared buffer all show.
"""

import types
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Method

HEADROOM = "headroom"  # slots kept free for tokens that are still to be decoded
WORKSPACE = "workspace"  # the current step's own small tensors
UNDECLARED = "undeclared"


@dataclass(frozen=True)
class Ledger:
    """Bytes by kind; their sum is all that is held."""

    kinds: dict[str, int]

    @property
    def allocated_bytes(self) -> int:
        return sum(self.kinds.values())

    @property
    def resident_bytes(self) -> int:
        """Without the headroom for tokens to come, which every method that appends needs alike, and the step's workspace."""
        return self.allocated_bytes - self.kinds.get(HEADROOM, 0) - self.kinds.get(WORKSPACE, 0)


def measure(method: Method) -> Ledger:
    """Ledger of a bound method, over all layers and sequences."""
    kind_of = dict.fromkeys(held_storages(method.step), WORKSPACE)
    slot_storages: set[int] = set()
    for owner in (method, *method.layers):
        for kind, tensors in owner.tensors().items():
            for tensor in tensors:
                kind_of[tensor.untyped_storage().data_ptr()] = kind
    for layer in method.layers:
        for tensors in layer.slots.tensors().values():
            slot_storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
    kinds: dict[str, int] = {}
    plan = method.planned
    for pointer, size in held_storages(method).items():
        free = size // plan.num_slots * plan.headroom if pointer in slot_storages else 0
        kind = kind_of.get(pointer, UNDECLARED)
        kinds[kind] = kinds.get(kind, 0) + size - free
        if free:
            kinds[HEADROOM] = kinds.get(HEADROOM, 0) + free
    return Ledger(kinds)


def held_storages(root) -> dict[int, int]:
    """Bytes of every storage that can be reached from root's attributes, by data pointer. The model itself is not followed."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type | types.FunctionType | types.ModuleType | torch.nn.Module):
            stack.extend(vars(item).values())
    return {pointer: size for pointer, size in storages.items() if size}
