"""The oracle of all methods: a Llama in fp64, written out, whose cache is a list per layer and KV head that a policy edits."""

import copy

import pytest
import torch

from harness.engine import Engine


class KeepAll:
    """What a policy may decide; positions are true positions, ascending. Weights are softmax probabilities in fp64."""

    def prompt(self, layer, head, weights):
        """Positions that stay of a prompt, from all its probabilities [G, T, T]."""
        return list(range(weights.shape[-1]))

    def read(self, layer, head, held, logits):
        """Which of the held positions (the new token's is the last) take part in a step; logits [G, len(held)]."""
        return held

    def after(self, layer, head, held, weights):
        """Positions that stay after a step, from its probabilities [G, len(held)]."""
        return held


class Slow:
    """Runs a Hugging Face Llama's weights token by token over what the policy holds."""

    def __init__(self, model, policy):
        model = copy.deepcopy(model).double()
        self.policy, self.config, self.decoder, self.head = policy, model.config, model.model, model.lm_head.weight
        config = model.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        steps = torch.arange(0, config.head_dim, 2).double() / config.head_dim
        self.frequencies = config.rope_parameters["rope_theta"] ** -steps

    def rotated(self, x, positions):  # [H, N, D] at positions [N]
        angles = positions.double()[:, None] * self.frequencies
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def norm(self, x, module):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * module.weight

    def qkv(self, attention, x, positions):
        heads = [
            torch.stack((x @ p.weight.T).split(self.config.head_dim, -1))
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        return self.rotated(heads[0], positions), self.rotated(heads[1], positions), heads[2]

    def rest(self, layer, x, attended):
        """Output projection and MLP: x [N, hidden], attended [Hq, N, D]."""
        x = x + attended.transpose(0, 1).flatten(1) @ layer.self_attn.o_proj.weight.T
        y, mlp = self.norm(x, layer.post_attention_layernorm), layer.mlp
        gate, up, down = (m.weight.T for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down

    def logits(self, x):
        return (self.norm(x, self.decoder.norm) @ self.head.T)[-1]

    @torch.no_grad()
    def prefill(self, ids):
        """Dense prompt [T]; logits [V]."""
        length, scale = len(ids), self.config.head_dim**-0.5
        positions = torch.arange(length)
        x = self.decoder.embed_tokens.weight[ids]
        self.caches, self.seen = [], length
        for number, layer in enumerate(self.decoder.layers):
            q, k, v = self.qkv(layer.self_attn, self.norm(x, layer.input_layernorm), positions)
            wide_k, wide_v = (rows.repeat_interleave(self.group, 0) for rows in (k, v))
            scores = (q @ wide_k.mT * scale).masked_fill(positions > positions[:, None], -torch.inf)
            weights = scores.softmax(-1)  # [Hq, T, T]
            heads = []
            for head in range(len(k)):
                kept = self.policy.prompt(number, head, weights[head * self.group : (head + 1) * self.group])
                heads.append({j: (k[head, j], v[head, j]) for j in kept})
            self.caches.append(heads)
            x = self.rest(layer, x, weights @ wide_v)
        return self.logits(x)

    @torch.no_grad()
    def step(self, token):
        """One token (an int) over what is held; logits [V]."""
        here, scale = torch.tensor([self.seen]), self.config.head_dim**-0.5
        x = self.decoder.embed_tokens.weight[token][None]
        for number, layer in enumerate(self.decoder.layers):
            q, k, v = self.qkv(layer.self_attn, self.norm(x, layer.input_layernorm), here)
            attended = []
            for head, cache in enumerate(self.caches[number]):
                cache[self.seen] = (k[head, 0], v[head, 0])
                held, own = list(cache), q[head * self.group : (head + 1) * self.group, 0]  # [G, D]
                everything = own @ torch.stack([cache[j][0] for j in held]).T * scale
                taken = self.policy.read(number, head, held, everything)
                weights = everything[:, [held.index(j) for j in taken]].softmax(-1)
                attended.append(weights @ torch.stack([cache[j][1] for j in taken]))
                kept = self.policy.after(number, head, taken, weights)
                if len(kept) < len(taken):
                    self.caches[number][head] = {j: cache[j] for j in kept}
            x = self.rest(layer, x, torch.cat(attended)[:, None])
        self.seen += 1
        return self.logits(x)

    def held(self, layer):
        """Sorted positions of each KV head."""
        return [sorted(cache) for cache in self.caches[layer]]


def held_by(engine, layer, seq=0):
    """The same of an engine."""
    return [sorted(j for j in row if j >= 0) for row in engine.positions(layer)[seq].tolist()]


@pytest.fixture
def follow(tiny_llama):
    """Engine and oracle side by side: same logits and same held positions after the prompt and after every token.

    run: `more` makes a prompt that many tokens longer than there are slots, in place of `length`.
    """

    def run(method, policy, length, steps, max_prompt_len=None, group=3, more=None):
        heads = {1: 2, 3: 6, 4: 8, 8: 16}[group]
        model = tiny_llama(hidden_size=96 if group == 3 else 64, num_attention_heads=heads, num_key_value_heads=2)
        engine = Engine(model, method, batch_size=1, max_prompt_len=max_prompt_len or length, max_new_tokens=steps)
        length = length if more is None else method.planned.kept + more
        ids, forced = torch.randint(0, 512, (length,)), torch.randint(0, 512, (steps,))
        slow = Slow(model, policy(method))
        logits = [(engine.prefill(ids[None])[0], slow.prefill(ids))]
        for token in [None, *forced.tolist()]:
            if token is not None:
                engine.score(torch.tensor([[token]]))
                logits.append((engine.logits[0].clone(), slow.step(token)))
            for layer in range(2):
                assert held_by(engine, layer) == slow.held(layer), f"layer {layer} after {slow.seen} tokens"
        actual, expected = (torch.stack(rows) for rows in zip(*logits, strict=True))
        assert (actual - expected).abs().max() < 1e-4
        return engine, slow

    return run


@pytest.fixture
def garbage_is_never_read(tiny_llama):
    """What a longer prompt left behind, or NaN in every tensor of the cache, changes nothing of a short prompt."""

    def run(method, length=7, steps=9):
        model, ids = tiny_llama(), torch.randint(0, 512, (1, 40))
        engine = Engine(model, method, batch_size=1, max_prompt_len=40, max_new_tokens=steps)
        engine.prefill(ids[:, :length])
        expected, held = engine.decode(steps), engine.positions(1)
        engine.prefill(ids)
        engine.decode(steps)
        engine.prefill(ids[:, :length])
        assert [sorted(row) for row in held_by(engine, 1)] == [list(range(length))] * 2
        assert torch.equal(engine.decode(steps), expected) and torch.equal(engine.positions(1), held)
        for owner in (method, *method.layers):
            for tensor in [t for tensors in owner.tensors().values() for t in tensors if t.is_floating_point()]:
                tensor.fill_(torch.nan)
        engine.prefill(ids[:, :length])
        assert torch.equal(engine.decode(steps), expected) and engine.finite()

    return run


@pytest.fixture
def nan_stays_in_its_sequence(tiny_llama):
    """A sequence whose values are NaN says so, and its neighbour in the batch is as without it."""

    def run(method, steps=30):
        model, ids = tiny_llama(), torch.randint(0, 500, (2, 40))
        engine = Engine(model, method, batch_size=2, max_prompt_len=40, max_new_tokens=steps)
        engine.prefill(ids)
        expected = engine.decode(steps)[1]
        model.model.embed_tokens.weight[511] = torch.nan
        broken = ids.clone()
        broken[0, 5] = 511
        engine.prefill(broken)
        assert not engine.finite()
        # eviction may forget the NaN, so only the neighbour is asked
        assert torch.equal(engine.decode(steps)[1], expected)
        engine.prefill(ids)
        assert torch.equal(engine.decode(steps)[1], expected) and engine.finite(), "NaN of an earlier prompt is left over"

    return run


@pytest.fixture
def stays_constant(tiny_llama):
    """2,000 tokens: the same bytes in the same memory, no further tensor anywhere."""
    import gc

    def tensor_bytes():
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def run(method):
        model = tiny_llama(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=64)
        # the fused step spares the module's own time
        engine = Engine(model, method, batch_size=1, max_prompt_len=100, max_new_tokens=2000, step_impl="fused")
        engine.prefill(torch.randint(0, 64, (1, 100)))
        engine.decode(4)
        addresses = [t.data_ptr() for ts in method.layers[0].tensors().values() for t in ts]
        before, ledger = tensor_bytes(), engine.ledger()
        engine.decode(1990)
        assert tensor_bytes() == before
        assert engine.ledger() == ledger and ledger.resident_bytes <= method.budget_bytes(engine.spec)
        assert addresses == [t.data_ptr() for ts in method.layers[0].tensors().values() for t in ts]
        held = held_by(engine, 0)
        assert all(row[-1] == 2093 and len(row) >= method.planned.num_slots - 1 for row in held)
        assert engine.finite()

    return run
