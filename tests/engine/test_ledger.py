"""Bytes: what is held equals the formula, stays under the budget, and nothing can hide from the ledger."""

import collections
import dataclasses
import types

import pytest
import torch

from harness import hf
from harness.engine import Engine
from harness.ledger import measure
from harness.timing import Clock
from methods.full import Full
from methods.h2o import H2O
from methods.int8 import Int8
from methods.random import Random
from methods.snapkv import SnapKV
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window

LAYERS, KV_HEADS, DIM = 3, 2, 16
BUDGETED = {
    "window": lambda **knobs: Window(**knobs),
    "streaming_llm": lambda **knobs: StreamingLLM(**knobs),
    "sparda": lambda **knobs: SparDA(predict_layers=[1], window=4, **knobs),
    "h2o": lambda **knobs: H2O(**knobs),
    "snapkv": lambda **knobs: SnapKV(window=4, **knobs),
    "random": lambda **knobs: Random(window=4, **knobs),
}


def built(tiny_llama, method, batch=2, length=200, new=24):
    model = tiny_llama(num_hidden_layers=LAYERS)
    engine = Engine(model, method, batch_size=batch, max_prompt_len=length, max_new_tokens=new)
    engine.prefill(torch.randint(0, 512, (batch, length)))
    return engine


def test_full_is_the_formula(tiny_llama):
    ledger = built(tiny_llama, Full()).ledger()
    assert ledger.kinds == {
        "kv": 2 * LAYERS * 2 * KV_HEADS * 200 * DIM * 4,
        "headroom": 2 * LAYERS * 2 * KV_HEADS * 24 * DIM * 4,
    }


def test_int8_is_the_formula(tiny_llama):
    ledger = built(tiny_llama, Int8()).ledger()
    # 200 tokens fill 7 tiles of 32, 224 tokens too: there is no headroom
    rows = 2 * LAYERS * 2 * KV_HEADS * 224
    assert ledger.kinds == {"kv": rows * DIM, "scales": rows * 2, "tables": LAYERS * KV_HEADS * 4}


@pytest.mark.parametrize("kv_dtype", ("auto", "int8"))
@pytest.mark.parametrize("sparsity", (0.0, 0.1, 0.5, 0.8, 0.9))
@pytest.mark.parametrize("name", BUDGETED)
def test_budget_is_met_and_predicted(tiny_llama, name, sparsity, kv_dtype):
    # a tenth of 200 tokens is less than one tile
    length = 400 if kv_dtype == "int8" else 200
    engine = built(tiny_llama, BUDGETED[name](sparsity=sparsity, kv_dtype=kv_dtype), length=length)
    method, ledger = engine.method, engine.ledger()
    full = engine.spec.full_bytes(method.stored_dtype(engine.spec))
    assert ledger.resident_bytes == method.planned.resident_bytes
    assert {kind: size for kind, size in ledger.kinds.items() if kind != "headroom"} == method.planned.ledger
    assert ledger.resident_bytes <= (1 - sparsity) * full + 1e-6
    # and the budget is used: less than one slot (8 bit: one tile of 32) of all layers and sequences is left over
    slot = method.planned.resident_bytes / method.planned.kept * (32 if kv_dtype == "int8" else 1)
    assert ledger.resident_bytes > (1 - sparsity) * full - slot


@pytest.mark.parametrize("name", BUDGETED)
def test_kv_budget_is_a_share_of_the_bf16_cache(tiny_llama, name):
    for kv_dtype in ("auto", "int8"):
        engine = built(tiny_llama, BUDGETED[name](kv_budget=0.3, kv_dtype=kv_dtype))
        budget = 0.3 * 2 * LAYERS * 2 * KV_HEADS * 200 * DIM * 2
        # 8 bit comes in tiles of 32 slots
        assert (0.75 if kv_dtype == "int8" else 0.9) * budget < engine.ledger().resident_bytes <= budget + 1e-6


@pytest.mark.parametrize("name", ("window", "streaming_llm", "h2o"))
def test_overwriting_methods_hold_constant_memory(tiny_llama, name):
    engine = built(tiny_llama, BUDGETED[name](sparsity=0.8), new=90)
    before = engine.ledger()
    pointers = [t.data_ptr() for layer in engine.method.layers for ts in layer.tensors().values() for t in ts]
    engine.decode(90)
    assert engine.ledger().resident_bytes == before.resident_bytes
    assert pointers == [t.data_ptr() for layer in engine.method.layers for ts in layer.tensors().values() for t in ts]


class Hoarder(Window):
    """Broken on purpose: keeps the dense prompt beside its window, undeclared."""

    def make_layer(self, layer_idx):
        layer = super().make_layer(layer_idx)
        keep = layer.keep

        def hoard(q, k, v, seq):
            layer.secret = {"deep": [k.clone()]}
            keep(q, k, v, seq)

        layer.keep = hoard
        return layer


def hide_in(place):
    """A window that keeps the dense prompt where `place(layer, tensor)` puts it."""

    class Hider(Window):
        def make_layer(self, layer_idx):
            layer = super().make_layer(layer_idx)
            place(layer, torch.zeros(2, 2, KV_HEADS, 200, DIM))
            return layer

    return Hider


def in_closure(layer, tensor):
    layer.hook = lambda: tensor


def in_module(layer, tensor):
    layer.net = torch.nn.ParameterList([torch.nn.Parameter(tensor)])


def in_deque(layer, tensor):
    layer.queue = collections.deque([tensor])


def in_step(layer, tensor):
    begin = layer.method.begin_step

    def begin_step(seen):
        begin(seen)
        layer.method.step[f"kept{layer.layer_idx}"] = tensor

    layer.method.begin_step = begin_step
    layer.method.step[f"kept{layer.layer_idx}"] = tensor


class Slicer(Window):
    """Broken on purpose: its slots are a view of a storage as large as the full cache."""

    def make_layer(self, layer_idx):
        layer = super().make_layer(layer_idx)
        size = self.planned.num_slots
        layer.slots.k = torch.zeros(2, KV_HEADS, 200, DIM)[:, :, :size]
        return layer


@pytest.mark.parametrize(
    "broken",
    (Hoarder, Slicer, hide_in(in_closure), hide_in(in_module), hide_in(in_deque), hide_in(in_step)),
    ids=("attribute", "view", "closure", "module", "deque", "step"),
)
def test_hidden_memory_shows(tiny_llama, broken):
    engine = built(tiny_llama, broken(sparsity=0.8))
    with torch.inference_mode():
        engine.method.begin_step(engine.seen)
    ledger = engine.ledger()
    assert ledger.resident_bytes > 1.5 * engine.method.planned.resident_bytes
    assert ledger.resident_bytes > engine.method.budget_bytes(engine.spec)
    with pytest.raises(RuntimeError, match=rf"{broken.__name__} holds {ledger.resident_bytes} bytes after 0 decoded tokens"):
        engine.decode(2)


class Growing(Window):
    """Broken on purpose: from the 100th decoded token on it puts something aside at each step."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.num_begun = getattr(self, "num_begun", 0) + 1
        if self.num_begun > 100:
            self.secret = [*getattr(self, "secret", []), torch.zeros(1000)]


@pytest.mark.parametrize("parts", ([200], [1] * 200, [50, 150]), ids=("at_once", "one_by_one", "two_parts"))
def test_growth_shows_within_64_tokens(tiny_llama, parts):
    engine = built(tiny_llama, Growing(sparsity=0.8), new=200)
    held = engine.ledger().allocated_bytes
    message = f"Growing grew from {held} to {held + 28 * 4000} bytes while it decoded 128 tokens"
    with pytest.raises(RuntimeError, match=message):
        for part in parts:
            engine.decode(part)


def test_looking_at_the_ledger_is_not_timed(tiny_llama, monkeypatch):
    engine = built(tiny_llama, Window(sparsity=0.8), new=130)
    looks = []
    ticks = iter(range(10**6))
    monkeypatch.setattr("harness.timing.time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(engine, "check_bytes", lambda: looks.append((engine.num_steps, next(ticks))))
    clock = Clock(torch.device("cpu"))
    engine.decode(130, clock)
    assert [num_steps for num_steps, _ in looks] == [0, 64, 128]
    assert clock.durations_ms() == [1000] * 130, "a look takes a tick, too"


class Spacious(Window):
    """Broken on purpose: calls its dense slots headroom."""

    def plan(self, spec):
        return dataclasses.replace(super().plan(spec), headroom=200)


class Renamer(Window):
    """Broken on purpose: names its bytes so that they would not count."""

    def tensors(self):
        return {"workspace": [torch.zeros(5)]}


@pytest.mark.parametrize(("broken", "message"), ((Spacious, "headroom=200 slots, more than the 24"), (Renamer, "'workspace'")))
def test_bytes_cannot_be_renamed_away(tiny_llama, broken, message):
    with pytest.raises(ValueError, match=message):
        built(tiny_llama, broken(sparsity=0.8)).ledger()


def test_sparda_frees_the_waiting_layers(tiny_llama):
    engine = built(tiny_llama, SparDA(sparsity=0.5, predict_layers=[2], window=4))
    assert engine.method.waiting == [] and engine.method.observed == []
    assert "undeclared" not in measure(engine.method).kinds


@pytest.mark.parametrize(
    ("method", "message"),
    (
        (
            SparDA(sparsity=0.99, predict_layers=[1]),
            "leaves 1 slots of 200, fewer than the 37 that hold 4 sinks, 32 recent",
        ),
        (StreamingLLM(sparsity=0.99), "fewer than the 5 that hold 4 sinks and one token; largest sparsity here: 0.9"),
        (Window(kv_budget=0.001), "kv_budget=0.001 leaves 0 slots"),
        (
            SparDA(predict_layers=[3, 9]),
            "names a layer that the model lacks; it has layers 0 to 2, try method.predict_layers=",
        ),
    ),
    ids=("sparda", "streaming_llm", "kv_budget", "layers"),
)
def test_impossible_budgets_are_refused(tiny_llama, method, message):
    with pytest.raises(ValueError, match="leaves|names") as caught:
        built(tiny_llama, method)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "minimum"), (("window", 1), ("streaming_llm", 5), ("sparda", 9), ("h2o", 2), ("snapkv", 5), ("random", 9))
)
def test_the_named_largest_sparsity_works(tiny_llama, name, minimum):
    spec = hf.make_spec(tiny_llama(), batch_size=2, context_len=200, max_new_tokens=4, impl="reference")
    with pytest.raises(ValueError, match="largest sparsity here: ") as caught:
        BUDGETED[name](sparsity=0.998).plan(spec)
    limit = float(str(caught.value).rpartition(" ")[2])
    assert BUDGETED[name](sparsity=limit).plan(spec).kept >= minimum
