"""The conformance suite over every method in methods/ and every kv_dtype, and its command line."""

import dataclasses

import pytest

import methods
from harness import conform
from harness.config import discover
from methods.base import Method
from methods.slots import DTYPES, KV_DTYPES

FOUND = discover(methods, Method)
# knobs, where a method has them, that let it live in a small model
SMALL = {"predict_layers": [1], "window": 4}
STORED = ("auto", *(name for name in KV_DTYPES if name not in DTYPES))
# storage is the same code for all methods, so the rarer formats are tried on three: appended, compacted, overwritten
CASES = [
    (name, kv_dtype)
    for name in FOUND
    for kv_dtype in STORED
    if kv_dtype == "auto" or name not in KV_DTYPES and (kv_dtype == "int8" or name in ("full", "sparda", "h2o"))
]
# what has nothing to look at; a method that is not listed may have other reasons
SPARED = {
    ("full", "auto"): {"order_and_sinks", "smallest_budget", "refusal"},
    ("window", "int8"): {"keep_all_is_dense"},
} | {(name, "auto"): set() for name in ("window", "streaming_llm", "sparda")}
DEVICES = (pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu))


def maker(name: str, kv_dtype: str):
    fields = {field.name for field in dataclasses.fields(FOUND[name])}
    # a 16-bit tail of 128 tokens leaves no room at higher sparsity in prompts as short as these
    small = SMALL | {"sparsity": 0.2} if kv_dtype == "int4" and not FOUND[name]().overwrites else SMALL
    knobs = {knob: value for knob, value in small.items() if knob in fields}
    return lambda: FOUND[name](**knobs, **({} if kv_dtype == "auto" else {"kv_dtype": kv_dtype}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_method_conforms(name, kv_dtype, device):
    try:
        subject = conform.Subject(maker(name, kv_dtype), device)
    except ValueError as refusal:
        # a method may refuse a storage, in one line that names it; nothing else
        assert kv_dtype != "auto" and kv_dtype in str(refusal) and "\n" not in str(refusal), refusal
        pytest.skip(str(refusal))
    results = [conform.run_check(subject, function) for function in conform.CHECKS]
    assert not [result for result in results if result.outcome == "fail"], conform.table(results)
    spared = {result.check for result in results if result.outcome == "not applicable"}
    if device == "cpu" and (name, kv_dtype) in SPARED:
        assert spared == SPARED[name, kv_dtype] | {"graph_is_eager"}, conform.table(results)
