"""Sensitivity per KV head: a planted head is found, its error is an fp64 oracle's, and 8 bits there pay off in the budget."""

import json

import pytest
import torch

from harness import sensitivity
from harness.engine import Engine
from methods.full import Full
from methods.int4 import Int4
from methods.sparda import SparDA
from methods.window import Window

LENGTH = 300
PLANTED = (1, 2)  # layer, KV head


@pytest.fixture(scope="module")
def model(tiny_llama):
    """Three KV heads of 32; in one of them keys are far from zero in a changing direction, which 4 bits hold badly."""
    made = tiny_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    layer, head = PLANTED
    made.model.layers[layer].self_attn.k_proj.weight[head * 32 : (head + 1) * 32] *= 6
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 512, (2, LENGTH), generator=generator).tolist()


def grouped(x, dim):
    """fp64 numbers in 16 levels between the least and the largest of each 32 along `dim`."""
    x = x.unflatten(dim, (-1, 32))
    low, high = x.amin(dim + 1, keepdim=True), x.amax(dim + 1, keepdim=True)
    return (low + ((x - low) / (high - low) * 15).round() * (high - low) / 15).flatten(dim, dim + 1)


def oracle(model, prompt):
    """Errors [L, Hkv] from transformers' own projections: 300 tokens are one sealed block, one newest block and a rest."""
    taken = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            hook = lambda module, args, out, at=(number, name): taken.__setitem__(at, out[0].double())  # noqa: E731
            hooks.append(getattr(layer.self_attn, name).register_forward_hook(hook))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    angles = torch.arange(LENGTH).double()[:, None] * model.model.rotary_emb.inv_freq.double()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    errors = torch.zeros(len(model.model.layers), 3)
    for number in range(len(model.model.layers)):
        for head in range(3):
            outs = []
            k, v = (taken[number, name][:, head * 32 : (head + 1) * 32] for name in ("k_proj", "v_proj"))
            k = k * cos + torch.cat([-k[:, 16:], k[:, :16]], 1) * sin
            for keys, values in ((k, v), (coded(k, 0), coded(v, 1))):
                for query in range(head * 2, head * 2 + 2):
                    q = taken[number, "q_proj"][:, query * 32 : (query + 1) * 32]
                    q = q * cos + torch.cat([-q[:, 16:], q[:, :16]], 1) * sin
                    scores = (q[128:256] @ keys[:256].T * 32**-0.5).masked_fill(
                        torch.arange(256) > torch.arange(128, 256)[:, None], -torch.inf
                    )
                    outs.append(scores.softmax(-1) @ values[:256])
            exact, quantised = torch.stack(outs[:2]), torch.stack(outs[2:])
            errors[number, head] = (quantised - exact).norm() / exact.norm()
    return errors


def coded(x, dim):
    return torch.cat([grouped(x[:128], dim), x[128:]])


def test_errors_are_the_oracle_s_and_show_the_planted_head(model, prompts):
    errors = sensitivity.measure(model, prompts)
    expected = torch.stack([oracle(model, prompt) for prompt in prompts]).mean(0)
    assert ((errors - expected).abs() < 0.03 * expected).all()
    flat = errors.flatten().sort(descending=True)
    assert divmod(int(flat.indices[0]), 3) == PLANTED and flat.values[0] > 1.5 * flat.values[1]


def spec_of(model, length=LENGTH):
    return Engine(model, Full(), batch_size=1, max_prompt_len=length, max_new_tokens=30).spec


def test_as_many_heads_as_the_budget_pays(model, tmp_path):
    spec = spec_of(model)
    errors = torch.tensor([[0.1, 0.3, 0.2], [0.3, 0.05, 0.9]])
    order = [(1, 2), (0, 1), (1, 0), (0, 2), (0, 0), (1, 1)]
    path = tmp_path / "bits.json"
    counts = []
    for budget in (0.71, 0.75, 0.8, 0.9, 1.0):
        bits = sensitivity.head_bits(errors, spec, budget)
        eights = [at for at in order if bits[at[0]][at[1]] == 8]
        assert eights == order[: len(eights)], "the most sensitive first, the earlier of two equals"
        counts.append(len(eights))
        path.write_text(json.dumps({"bits": bits}))
        held = Int4(head_bits=str(path)).plan(spec).resident_bytes
        assert held <= budget * spec.full_bytes("bf16")
        if len(eights) < 6:
            more = [row[:] for row in bits]
            layer, head = order[len(eights)]
            more[layer][head] = 8
            path.write_text(json.dumps({"bits": more}))
            assert Int4(head_bits=str(path)).plan(spec).resident_bytes > budget * spec.full_bytes("bf16"), "one more would fit"
    assert counts == sorted(counts) and 0 < counts[1] < counts[-1] == 6
    with pytest.raises(
        ValueError, match="kv_budget=0.5 is less than 4 bits everywhere, 16-bit tail included; smallest here: 0."
    ) as err:
        sensitivity.head_bits(errors, spec, 0.5)
    smallest = float(str(err.value).rpartition(" ")[2])
    assert sensitivity.head_bits(errors, spec, smallest) and smallest < 0.71


def test_mixed_bits_in_the_engine(model, prompts, tmp_path):
    """Ledger = plan, 8 bits help most in the planted head, and the row's facts say which heads have them."""
    forced, outs = torch.tensor([prompts[1][:3]]), {}
    for name, bits in {"full": None, "planted": [[8, 8, 8], [4, 4, 8]], "other": [[8, 8, 8], [8, 4, 4]]}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"bits": bits}))
        method = Int4(head_bits=str(path)) if bits else Full()
        engine = Engine(model, method, batch_size=1, max_prompt_len=LENGTH, max_new_tokens=90)
        layer, outs[name] = method.layers[1], []
        decode = layer.decode
        layer.decode = lambda *rows, decode=decode, taken=outs[name]: taken.append(decode(*rows)) or taken[-1]
        engine.prefill(torch.tensor([prompts[0]]))
        assert engine.ledger().resident_bytes == method.planned.resident_bytes
        engine.score(forced)
    error = {name: (torch.stack(own) - torch.stack(outs["full"])).norm() for name, own in outs.items()}
    assert 0 < error["planted"] < 0.6 * error["other"]
    del layer.decode  # the ledger would find what it keeps
    engine.decode(86)  # over the end of a block
    assert engine.finite()
    path = tmp_path / "planted.json"
    method = Int4(head_bits=str(path))
    method.bind(engine.spec)
    # four heads at 8.5 bits, two at 5
    bits = pytest.approx((4 * 8.5 + 2 * 5) / 6, abs=1e-3)
    assert method.stored_facts() == {"kv_format": "mixed", "kv_bits": bits, "head_bits": ["888", "448"]}
    # sparsity is measured against the dense cache of the same bits
    sparse = SparDA(sparsity=0.2, predict_layers=[1], kv_dtype="int4", head_bits=str(path))
    engine = Engine(model, sparse, batch_size=1, max_prompt_len=LENGTH, max_new_tokens=90)
    assert engine.ledger().resident_bytes <= 0.8 * Int4(head_bits=str(path)).plan(engine.spec).resident_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda path: Full(head_bits=path), "head_bits raises heads of kv_dtype=int4 to 8 bits; set kv_dtype=int4, not auto"),
        (lambda path: Window(kv_dtype="int4", head_bits=path), "head_bits: Window overwrites slots, mixed bits seal them"),
        (
            lambda path: Int4(head_bits=path + ".txt"),
            "is no list of bits per head: write one with python -m harness.sensitivity",
        ),
        (lambda path: Int4(head_bits=path), "is not for 2 layers with 3 KV heads: run python -m harness.sens"),
    ),
    ids=("dtype", "overwrites", "no_file", "other_model"),
)
def test_mistakes_are_one_line(model, tmp_path, make, message):
    path = tmp_path / "bits.json"
    path.write_text('{"bits": [[8, 4]]}')
    with pytest.raises(ValueError, match="head_bits") as err:
        make(str(path)).plan(spec_of(model))
    assert message in str(err.value) and "\n" not in str(err.value)


DUMMY = ["model=dummy", "model.config.num_hidden_layers=2", "shape.context_len=384"]


def test_command_line(tmp_path, capsys):
    out = tmp_path / "head_bits.json"
    assert sensitivity.main([*DUMMY, "kv_budget=0.8", "--texts", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    written = json.loads(out.read_text())
    assert json.loads(printed[-1]) == written and written["kv_budget"] == 0.8
    assert f"python run.py method=int4 method.head_bits={out}" in printed
    num = sum(layer.count(8) for layer in written["bits"])
    assert printed[0].startswith(f"{num} of 4 KV heads get 8 bits") and 0 < num < 4
    assert all(0 < error < 1 for layer in written["errors"] for error in layer)


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ([*DUMMY], "give the share of the bf16 cache that all heads may take, as in kv_budget=0.4"),
        ([*DUMMY, "kv_budget=0.1"], "kv_budget=0.1 is less than 4 bits everywhere"),
        ([*DUMMY, "kv_budget=1.0", "shape.context_len=200"], "shape.context_len=200 holds no sealed and no newest block"),
        (["model=dumy", "kv_budget=0.5"], "unknown model 'dumy': did you mean dummy"),
    ),
    ids=("no_budget", "small_budget", "short", "typo"),
)
def test_command_line_mistakes(words, message, capsys, tmp_path):
    assert sensitivity.main([*words, "--out", str(tmp_path / "x.json")]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and err.startswith("error: ") and "\n" not in err
