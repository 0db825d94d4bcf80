"""The ledger: bytes of the storages that a method really holds, compared with what it predicted.

Every tensor that can be reached from the method and its layers (attributes, containers, closures, modules) counts with its
whole storage, once, whether the method declares it or not. So a view that keeps a large storage alive, a forgotten dense copy
and an undeclared buffer all show. Globals of a module are not searched.
"""

import gc
import types
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from methods.base import Method, Spec

HEADROOM = "headroom"  # slots kept free for tokens that are still to be decoded
WORKSPACE = "workspace"  # the current step's own small tensors
WORKSPACE_LIMIT = 4096  # bytes per layer and sequence
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

    def __add__(self, other: "Ledger") -> "Ledger":
        kinds = [*self.kinds, *(kind for kind in other.kinds if kind not in self.kinds)]
        return Ledger({kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in kinds})


def measure(method: Method) -> Ledger:
    """Ledger of a bound method, over all layers and sequences."""
    kind_of: dict[int, str] = {}
    free: dict[int, int] = {}  # bytes of a slot storage that wait for tokens to come
    for owner in (method, *method.layers):
        for kind, tensors in owner.tensors().items():
            if kind in (HEADROOM, WORKSPACE, UNDECLARED):
                raise ValueError(f"{type(owner).__name__}.tensors() may not name a kind {kind!r}: the ledger decides that")
            for tensor in tensors:
                kind_of[tensor.untyped_storage().data_ptr()] = kind
    for layer in method.layers:
        for tensor, size in layer.slots.headroom(method.planned.layer_slots(layer.layer_idx)[1]):
            pointer = tensor.untyped_storage().data_ptr()
            free[pointer] = free.get(pointer, 0) + size
    step_storages = held_bytes(method.step)
    if sum(step_storages.values()) <= WORKSPACE_LIMIT * len(method.layers) * method.spec.batch_size:
        # more than that is no step's workspace and counts like any other tensor
        kind_of = dict.fromkeys(step_storages, WORKSPACE) | kind_of
    kinds: dict[str, int] = {}
    for pointer, size in held_bytes(method).items():
        kind, room = kind_of.get(pointer, UNDECLARED), free.get(pointer, 0)
        for name, part in ((kind, size - room), (HEADROOM, room)):
            if part:
                kinds[name] = kinds.get(name, 0) + part
    return Ledger(kinds)


def held_bytes(root) -> dict[int, int]:
    """Bytes of every storage that can be reached from root, by data pointer."""
    return {pointer: storage.nbytes() for pointer, storage in held_storages(root).items()}


def held_storages(root) -> dict[int, UntypedStorage]:
    """Every storage that can be reached from root, by data pointer."""
    storages: dict[int, UntypedStorage] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage
            stack.append(vars(item))
        elif isinstance(item, types.FunctionType):
            # what it closes over, not the globals of its module
            stack.extend((item.__closure__, item.__defaults__, item.__kwdefaults__, vars(item)))
        elif not isinstance(item, type | types.ModuleType | Spec):
            # the spec leads to the model, which is not the method's
            stack.extend(gc.get_referents(item))
    return {pointer: storage for pointer, storage in storages.items() if storage.nbytes()}
