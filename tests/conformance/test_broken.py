"""Every check of the conformance suite fails on a method that has the fault it looks for, and says so."""

import re

import pytest

from harness import conform
from tests.conformance import broken

# check, broken method, what the line must say
CASES = (
    ("order_and_sinks", broken.UnsortedTopK, "positions turn back [0-9]+ times"),
    ("order_and_sinks", broken.SinkLoser, "sink 0 of 4 is gone after the prompt"),
    ("order_and_sinks", broken.SinksInTheRing, "sink 0 of 4 is gone after 1 steps"),
    ("order_and_sinks", broken.ComesBack, "was evicted, step [0-9]+ claims it again"),
    ("unique_positions", broken.ClaimsTwice, "position 0 is claimed by two slots"),
    ("unique_positions", broken.ClaimsTheFuture, "claims position 92 of 92 tokens seen"),
    ("true_positions", broken.CacheLengthIsPosition, "slot 1 claims position 1, but its k"),
    ("true_positions", broken.Rerotated, "but its k is"),
    ("true_positions", broken.SwappedValues, "but its v is"),
    ("true_positions", broken.RoundsTwice, "but its k is .* further from that token's than int8 allows"),
    ("kernel_is_masked_dense", broken.OneTooFew, "off the masked dense forward"),
    ("kernel_is_masked_dense", broken.HeadsMixed, "off the masked dense forward"),
    ("keep_all_is_dense", broken.NeverNoop, "does not set Plan.noop"),
    ("keep_all_is_dense", broken.LossyFull, "off the dense model's"),
    ("gqa", broken.RepeatedHeads, "group 3: 6 heads are stored, the model has 2 KV heads"),
    ("gqa", broken.FirstHeadForAll, "group 1: .* off the masked dense forward"),
    ("ragged_batch", broken.LongestLength, "other tokens in the padding change what comes out"),
    ("ragged_batch", broken.PlaceInBatch, "step [0-9]+ differs between batch 1 and batch 8"),
    ("ragged_batch", broken.SharesTheBudget, "a prompt keeps [0-9]+ tokens alone and [0-9]+ in a batch of 8"),
    ("short_prompt", broken.FractionOfPrompt, "position [0-9]+ of 13 is lost although 18 fit"),
    ("one_token_prompt", broken.FractionOfPrompt, "position 0 of 1 is lost although 18 fit"),
    ("one_token_prompt", broken.AssertsLength, "AssertionError at broken.py:[0-9]+: the window does not fit"),
    ("smallest_budget", broken.EmptyRemote, "logits are not finite"),
    ("smallest_budget", broken.KeepsNothing, "is accepted and keeps 0 tokens"),
    ("refusal", broken.AtLeastOne, "is accepted and keeps 1 tokens"),
    ("refusal", broken.NamelessRefusal, "names no largest sparsity"),
    ("refusal", broken.WrongAdvice, "'sparsity': 0.51, .* is accepted"),
    ("bytes_are_predicted", broken.ForgetsIndex, "index 16 held, 0 predicted"),
    ("budget_is_met", broken.Overshoots, "sparsity allows .* are held"),
    ("budget_is_met", broken.MaskOnly, "sparsity allows .* are held"),
    ("budget_is_met", broken.ReadsAll, "sparsity allows .* are read per step"),
    ("budget_is_met", broken.MislabelledFull, "memory_class=freed, but"),
    ("budget_is_met", broken.SilentlySimulated, "does not say simulated"),
    ("nothing_undeclared", broken.Hoarder, "undeclared bytes"),
    ("no_views", broken.Slicer, "kv .* bytes lies in a storage of"),
    ("no_growth", broken.Leaks, "3200 more bytes are alive after 200 steps"),
    ("no_growth", broken.GrowingWindow, "more bytes are alive after 200 steps"),
    ("no_growth", broken.Reallocates, "at other addresses"),
    ("second_prompt", broken.Stale, "differ from those of a fresh engine"),
    ("unused_slots_do_not_leak", broken.ZeroWeight, "NaN in unused slots reaches the logits of step 1"),
    ("no_host_sync", broken.Item, "item at .*broken.py"),
    ("no_host_sync", broken.ToList, "tolist at .*broken.py"),
    ("no_host_sync", broken.NonZero, "nonzero at .*broken.py"),
    ("no_host_sync", broken.BooleanIndex, "index at .*broken.py"),
    ("same_ops_each_step", broken.PythonCounter, "step 1 differs from step 0: full_like"),
    ("same_ops_each_step", broken.Periodic, "step [0-9]+ differs from step 0"),
)
FUNCTIONS = {function.__name__: function for function in conform.CHECKS}


def outcome(check, method, device="cpu"):
    return conform.run_check(conform.Subject(method, device), FUNCTIONS[check])


@pytest.mark.parametrize(("check", "method", "says"), CASES, ids=[f"{check}-{method.__name__}" for check, method, _ in CASES])
def test_the_fault_is_found(check, method, says):
    result = outcome(check, method)
    assert result.outcome == "fail", result
    assert re.search(says, result.seen), result.seen


@pytest.mark.gpu
def test_a_frozen_counter_is_found():
    result = outcome("graph_is_eager", broken.PythonCounter, "cuda")
    assert (result.outcome, result.seen[-6:]) == ("fail", "differ"), result


def test_every_check_can_fail():
    assert {check for check, _, _ in CASES} | {"graph_is_eager"} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("method", "spared"),
    ((broken.Sampled, {"graph_is_eager"}), (broken.ReadsLess, {"graph_is_eager", "order_and_sinks"})),
    ids=("Sampled", "ReadsLess"),
)
def test_the_sound_methods_that_they_stand_on_pass(method, spared):
    results = conform.check(method, "cpu")
    assert {result.check for result in results if result.outcome != "pass"} == spared, conform.table(results)
