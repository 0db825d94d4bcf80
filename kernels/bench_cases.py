"""What `python -m kernels.bench` measures: every op at sizes that matter, competitors on the same tensors, the targets.

A case builds a Problem. Its tensors come as sets, one per call of a replay, so that no call finds its inputs in L2.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DEVICE = "cuda"
DTYPE = torch.bfloat16
NUM_HEADS, DIM = 32, 128
SCALE = DIM**-0.5


@dataclass
class Target:
    """A bound on a figure that is computed from the medians (ms by label) of one case."""

    figure: str
    value: Callable[[dict[str, float], float], float]
    "(medians, copy bandwidth in GB/s) -> figure; KeyError where a run is missing"
    bound: float
    at_least: bool = True
    run: str = "triton"


@dataclass
class Run:
    call: Callable[[dict], object]
    "one set -> output"
    gbytes: float = 0.0
    "what it must move, in GB"
    tflop: float = 0.0
    ours: bool = False
    config: Callable[[dict, dict | None], object] | None = None
    "(set, config) -> output, for --tune"
    like: str | None = None
    "another run that must give the same output"
    tolerance: float = 1e-2
    "relative RMS; 0: equal to the last bit"


@dataclass
class Problem:
    make: Callable[[], dict]
    "the tensors of one call"
    runs: dict[str, Run]
    targets: list[Target] = field(default_factory=list)
    num_sets: int | None = None
    "None: enough to push everything out of L2"


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    build: Callable[[], Problem]
    main: bool = False
    "what --tune sweeps"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def full(batch: int, length: int) -> Tensor:
    return torch.full((batch,), length, dtype=torch.int64, device=DEVICE)


def faster(ours: str, *others: str) -> Callable:
    """How many times faster than the fastest of the others that ran."""

    def value(medians: dict[str, float], copy: float) -> float:
        return min(medians[name] for name in others if name in medians) / medians[ours]

    return value


# decode ---------------------------------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend) -> Callable:
    def call(s: dict) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(s["q"][:, :, None], s["k"], s["v"], scale=SCALE, enable_gqa=True)[:, :, 0]

    return call


def flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    return lambda s: compiled(s["q"][:, :, None], s["k"], s["v"], scale=SCALE, enable_gqa=True)[:, :, 0]


def flashinfer(batch: int, num_kv_heads: int, length: int) -> Callable:
    """Paged decode with pages of 64 tokens; the pages are copies, since its layout has all heads in a page."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    page, per_sequence = 64, length // 64
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True
    )
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * per_sequence
    pages = torch.arange(batch * per_sequence, dtype=torch.int32, device=DEVICE)
    last = torch.full((batch,), page, dtype=torch.int32, device=DEVICE)
    wrapper.plan(offsets, pages, last, NUM_HEADS, num_kv_heads, DIM, page, q_data_type=DTYPE, kv_data_type=DTYPE)

    def call(s: dict) -> Tensor:
        if "pages" not in s:
            paged = (x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous() for x in (s["k"], s["v"]))
            s["pages"] = tuple(paged)
        return wrapper.run(s["q"], s["pages"])

    return call


def xformers() -> Callable:
    from xformers.ops import fmha

    def call(s: dict) -> Tensor:
        group = s["q"].shape[1] // s["k"].shape[1]
        k, v = (x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (s["k"], s["v"]))
        q = s["q"].unflatten(1, (-1, group))[:, None]  # [B, 1, Hkv, G, D]
        out = fmha.memory_efficient_attention_forward(q, k, v, scale=SCALE, op=fmha.triton_splitk.FwOp)
        return out[:, 0].flatten(1, 2)

    return call


def decode_competitors(batch: int, num_kv_heads: int, length: int, with_flex: bool) -> dict[str, Callable]:
    found = {"sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION), "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if with_flex:
        found["flex"] = flex()
    if importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = flashinfer(batch, num_kv_heads, length)
    if importlib.util.find_spec("xformers"):
        found["xformers split-k"] = xformers()
    return found


def kv_gbytes(batch: int, num_kv_heads: int, length: int, bits: float = 16) -> float:
    return 2 * batch * num_kv_heads * length * DIM * bits / 8 / 1e9


def make_decode(batch: int, num_kv_heads: int, length: int) -> dict:
    shape = (batch, num_kv_heads, length, DIM)
    return {"q": randn(batch, NUM_HEADS, DIM), "k": randn(*shape), "v": randn(*shape), "lengths": full(batch, length)}


def decode_run(config: dict | None = None, key: str = "", **options) -> Callable:
    """Decode over k, v of a set; `key` names an index or, ending in _k, other slots."""
    from kernels.decode_attention import decode_attention

    def call(s: dict, config: dict | None = config) -> Tensor:
        index = s[key] if key else None
        return decode_attention(
            s["q"], s["k"], s["v"], s["lengths"], SCALE, "triton", index=index, config=config, **options
        )[0]  # fmt: skip

    return call


def dense(batch: int, num_kv_heads: int, length: int, targets: Callable, with_flex: bool) -> Problem:
    gbytes = kv_gbytes(batch, num_kv_heads, length)
    others = decode_competitors(batch, num_kv_heads, length, with_flex)
    runs = {"triton": Run(decode_run(), gbytes, ours=True, config=decode_run(), like="sdpa flash")}
    runs |= {name: Run(call, gbytes) for name, call in others.items()}
    return Problem(lambda: make_decode(batch, num_kv_heads, length), runs, targets(gbytes, list(others)))


def one_gib(gbytes: float, others: list[str]) -> list[Target]:
    return [
        Target("of copy bandwidth", lambda ms, copy: gbytes / ms["triton"] * 1e3 / copy, 0.97),
        Target("x best competitor", faster("triton", *others), 1.0),
    ]


def batch_one(gbytes: float, others: list[str]) -> list[Target]:
    return [Target("x best competitor", faster("triton", *others), 1.05)]


def many_short(gbytes: float, others: list[str]) -> list[Target]:
    return [Target("x cudnn", faster("triton", "sdpa cudnn"), 1.0), Target("x flash", faster("triton", "sdpa flash"), 1.5)]


def kept(batch: int, num_kv_heads: int, length: int, share: float, target: float | None) -> Problem:
    """Token lists and compacted slots against dense."""
    num_kept = int(length * share)

    def make() -> dict:
        s = make_decode(batch, num_kv_heads, length)
        picks = torch.rand(batch, num_kv_heads, length, device=DEVICE).argsort(-1)[..., :num_kept].sort(-1).values
        s["index"] = picks.int()
        s["shared"] = s["index"][:, :1].contiguous()
        s["few"] = {"q": s["q"], "lengths": full(batch, num_kept)}
        for name in ("k", "v"):
            s["few"][name] = s[name].gather(2, picks[..., None].expand(-1, -1, -1, DIM))
        return s

    gbytes = kv_gbytes(batch, num_kv_heads, num_kept)
    by_list, shared, plain = decode_run(key="index"), decode_run(key="shared"), decode_run()
    runs = {
        "dense": Run(plain, kv_gbytes(batch, num_kv_heads, length), ours=True),
        "token list": Run(by_list, gbytes, ours=True, config=by_list, like="compacted"),
        "shared list": Run(shared, gbytes, ours=True),
        "compacted": Run(lambda s: plain(s["few"]), gbytes, ours=True, config=lambda s, config: plain(s["few"], config)),
    }
    targets = [Target("x dense", faster(run, "dense"), target, run=run) for run in ("token list", "compacted")]
    return Problem(make, runs, targets if target else [])


def kept_blocks(batch: int, num_kv_heads: int, length: int, share: float) -> Problem:
    sizes = (16, 64, 128)

    def make() -> dict:
        s = make_decode(batch, num_kv_heads, length)
        for size in sizes:
            num = length // size
            order = torch.rand(batch, num_kv_heads, num, device=DEVICE).argsort(-1)
            s[f"blocks{size}"] = order[..., : int(num * share)].sort(-1).values.int()
        return s

    gbytes = kv_gbytes(batch, num_kv_heads, int(length * share))
    runs = {f"blocks of {n}": Run(decode_run(key=f"blocks{n}", block_size=n), gbytes, ours=True) for n in sizes}
    return Problem(make, {"dense": Run(decode_run(), kv_gbytes(batch, num_kv_heads, length), ours=True), **runs})


def h2o(batch: int, num_kv_heads: int, length: int) -> Problem:
    from kernels.decode_attention import decode_attention
    from kernels.h2o_update import h2o_update

    def make() -> dict:
        s = make_decode(batch, num_kv_heads, length)
        s["logits"] = torch.empty(batch, NUM_HEADS, length, device=DEVICE)
        s["scores"] = torch.rand(batch, num_kv_heads, length, device=DEVICE)
        positions = torch.arange(length, dtype=torch.int32, device=DEVICE)
        s["positions"] = positions.expand(batch, num_kv_heads, -1).contiguous()
        s["seen"] = full(batch, length)
        s["lse"] = s["logits"].normal_().logsumexp(-1)
        return s

    def attend(s: dict) -> tuple[Tensor, Tensor]:
        return decode_attention(s["q"], s["k"], s["v"], s["lengths"], SCALE, "triton", logits=s["logits"])

    def update(s: dict, lse: Tensor, config: dict | None = None) -> Tensor:
        return h2o_update(
            s["scores"], s["positions"], s["logits"], lse, s["lengths"], s["seen"], 1024, "sum", "triton", config=config
        )  # fmt: skip

    def step(s: dict) -> Tensor:
        out, lse = attend(s)
        update(s, lse)
        return out

    gbytes = kv_gbytes(batch, num_kv_heads, length)
    logits = batch * NUM_HEADS * length * 4 / 1e9
    scores = batch * num_kv_heads * length * 12 / 1e9
    runs = {
        "plain decode": Run(decode_run(), gbytes, ours=True),
        "decode + logits": Run(lambda s: attend(s)[0], gbytes + logits, ours=True, like="plain decode"),
        "update": Run(
            lambda s: update(s, s["lse"]), logits + scores, ours=True, config=lambda s, config: update(s, s["lse"], config)
        ),
        "whole step": Run(step, gbytes + 2 * logits + scores, ours=True, like="plain decode"),
    }
    target = Target("x plain decode", lambda ms, copy: ms["whole step"] / ms["plain decode"], 1.15, False, "whole step")
    return Problem(make, runs, [target])


# quantised ------------------------------------------------------------------------------------------------------------


def filled(name: str, batch: int, num_kv_heads: int, length: int, k: Tensor, v: Tensor):
    from kernels.quantize import KVFormat, allocate, quantize

    bits = tuple(8 if head < num_kv_heads // 2 else 4 for head in range(num_kv_heads)) if name == "mixed" else ()
    kv = allocate(KVFormat(name, head_bits=bits), batch, num_kv_heads, length, DIM, DTYPE, DEVICE)
    for seq in range(batch):
        quantize(kv, seq, 0, k[seq : seq + 1], v[seq : seq + 1], "triton")
    return kv


def quantised(batch: int, num_kv_heads: int, length: int, wanted: dict[str, float | None]) -> Problem:
    from kernels.decode_attention_quant import decode_attention_quant

    def make() -> dict:
        s = make_decode(batch, num_kv_heads, length)
        return s | {name: filled(name, batch, num_kv_heads, length, s["k"], s["v"]) for name in wanted}

    def attend(name: str) -> Callable:
        def call(s: dict, config: dict | None = None) -> Tensor:
            return decode_attention_quant(s["q"], s[name], s["lengths"], SCALE, "triton", config=config)[0]

        return call

    from kernels.quantize import KVFormat

    runs = {"bf16": Run(decode_run(), kv_gbytes(batch, num_kv_heads, length), ours=True)}
    for name in wanted:
        bits = tuple(8 if head < num_kv_heads // 2 else 4 for head in range(num_kv_heads)) if name == "mixed" else ()
        gbytes = kv_gbytes(batch, num_kv_heads, length, KVFormat(name, head_bits=bits).bits(DIM, num_kv_heads))
        # random keys of 4 bits: the formats' own error, measured against bf16
        tolerance = {"fp8": 0.06, "int8": 0.02}.get(name, 0.25)
        runs[name] = Run(attend(name), gbytes, ours=True, config=attend(name), like="bf16", tolerance=tolerance)
    targets = [Target("x bf16", faster(name, "bf16"), bound, run=name) for name, bound in wanted.items() if bound]
    return Problem(make, runs, targets)


def written(batch: int, num_kv_heads: int, length: int, names: tuple[str, ...]) -> Problem:
    """Quantising a prompt: reads 16 bits, writes codes."""
    from kernels.quantize import KVFormat, allocate, quantize

    def make() -> dict:
        shape = (1, num_kv_heads, length, DIM)
        s = {"k": randn(*shape), "v": randn(*shape)}
        return s | {name: allocate(KVFormat(name), 1, num_kv_heads, length, DIM, DTYPE, DEVICE) for name in names}

    runs = {}
    for name in names:
        gbytes = kv_gbytes(1, num_kv_heads, length, 16 + KVFormat(name).bits(DIM, num_kv_heads))
        runs[name] = Run(
            functools.partial(lambda s, n: quantize(s[n], 0, 0, s["k"], s["v"], "triton"), n=name), gbytes, ours=True
        )
    return Problem(make, runs)


def appended_quant(batch: int, num_kv_heads: int, names: tuple[str, ...]) -> Problem:
    from kernels.append_quant import append_quant
    from kernels.quantize import KVFormat, allocate

    def make() -> dict:
        s = {"k": randn(batch, num_kv_heads, DIM), "v": randn(batch, num_kv_heads, DIM)}
        s |= {"slot": full(batch, 700), "sealing": full(batch, 767)}
        return s | {name: allocate(KVFormat(name), batch, num_kv_heads, 1024, DIM, DTYPE, DEVICE) for name in names}

    def call(s: dict, name: str, slot: str) -> None:
        append_quant(s[name], s["k"], s["v"], s[slot], "triton")

    runs = {name: Run(functools.partial(call, name=name, slot="slot"), ours=True) for name in names}
    runs["int4, sealing a block"] = Run(functools.partial(call, name="int4", slot="sealing"), ours=True)
    return Problem(make, runs)


# prefill --------------------------------------------------------------------------------------------------------------


def prefill_tflop(length: int, share: float = 1.0) -> float:
    return 2 * 2 * NUM_HEADS * DIM * length * length / 2 * share / 1e12


def make_prefill(num_kv_heads: int, length: int) -> dict:
    k, v = (randn(1, num_kv_heads, length, DIM) for _ in "kv")
    return {"q": randn(1, NUM_HEADS, length, DIM), "k": k, "v": v}


def causal_sdpa(backend: SDPBackend) -> Callable:
    def call(s: dict) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(s["q"], s["k"], s["v"], is_causal=True, scale=SCALE, enable_gqa=True)

    return call


def dense_prefills(length: int) -> dict[str, Run]:
    backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    return {name: Run(causal_sdpa(backend), tflop=prefill_tflop(length)) for name, backend in backends.items()}


def prefill_run(impl: str) -> Callable:
    from kernels.prefill_attention import prefill_attention

    def call(s: dict, config: dict | None = None) -> Tensor:
        return prefill_attention(s["q"], s["k"], s["v"], SCALE, return_lse=True, impl=impl, config=config)[0]

    return call


def dense_prefill(num_kv_heads: int, length: int) -> Problem:
    tflop = prefill_tflop(length)
    ours = {
        "impl=sdpa with LSE": Run(prefill_run("sdpa"), tflop=tflop, ours=True, like="sdpa flash"),
        "impl=triton": Run(prefill_run("triton"), tflop=tflop, ours=True, like="sdpa flash", config=prefill_run("triton")),
    }
    return Problem(lambda: make_prefill(num_kv_heads, length), ours | dense_prefills(length), num_sets=1)


def against_dense(
    make: Callable[[], dict], sparse: Callable[[float], Callable], length: int, wanted: dict[float, float | None]
) -> Problem:
    """Shares of a prompt's attention against all of it; sparse(share) is the run, `wanted` its least speed-up or None."""
    runs = {"sdpa cudnn": dense_prefills(length)["sdpa cudnn"]}
    for share in wanted:
        runs[f"keep {share:.0%}"] = Run(sparse(share), tflop=prefill_tflop(length, share), ours=True, config=sparse(share))
    targets = [
        Target("x cudnn dense", faster(f"keep {share:.0%}", "sdpa cudnn"), bound, run=f"keep {share:.0%}")
        for share, bound in wanted.items()
        if bound
    ]
    return Problem(make, runs, targets, num_sets=1)


def block_sparse(num_kv_heads: int, length: int, wanted: dict[float, float | None], block_size: int = 128) -> Problem:
    """Random lists per query head, the own block and the first always kept."""
    from kernels.prefill_attention import lists_of, prefill_attention

    num_blocks = length // block_size
    causal = torch.ones(num_blocks, num_blocks, dtype=torch.bool).tril()

    def make() -> dict:
        s = make_prefill(num_kv_heads, length)
        for share in wanted:
            mask = torch.rand(1, NUM_HEADS, num_blocks, num_blocks, device=DEVICE) < share
            mask |= torch.eye(num_blocks, dtype=torch.bool, device=DEVICE)
            mask[..., 0] = True
            s[share] = lists_of(mask & causal.to(DEVICE))
        return s

    def sparse(share: float) -> Callable:
        def call(s: dict, config: dict | None = None) -> Tensor:
            return prefill_attention(
                s["q"], s["k"], s["v"], SCALE, blocks=s[share], block_size=block_size, impl="triton", config=config
            )  # fmt: skip

        return call

    return against_dense(make, sparse, length, wanted)


def regrouped(num_kv_heads: int, length: int, wanted: dict[float, float | None], block_size: int = 64) -> Problem:
    """Rows and keys in a random order of blocks, random lists per KV head."""
    from kernels.prefill_attention import lists_of
    from kernels.rows_attention import rows_attention

    num_blocks = length // block_size

    def make() -> dict:
        s = make_prefill(num_kv_heads, length)
        blocks = torch.randperm(num_blocks, device=DEVICE)
        s["order"] = (blocks[:, None] * block_size + torch.arange(block_size, device=DEVICE)).flatten().int()
        causal = blocks <= blocks[:, None]
        for share in wanted:
            mask = torch.rand(1, num_kv_heads, num_blocks, num_blocks, device=DEVICE) < share
            mask |= torch.eye(num_blocks, dtype=torch.bool, device=DEVICE)
            s[share] = lists_of(mask & causal)
        return s

    def sparse(share: float) -> Callable:
        def call(s: dict, config: dict | None = None) -> Tensor:
            order = s["order"]
            return rows_attention(
                s["q"], s["k"], s["v"], order, order, s[share], block_size, SCALE, "triton", config=config
            )  # fmt: skip

        return call

    return against_dense(make, sparse, length, wanted)


def summed_columns(num_kv_heads: int, length: int) -> Problem:
    from kernels.column_sums import column_sums
    from kernels.prefill_attention import prefill_attention

    def make() -> dict:
        s = make_prefill(num_kv_heads, length)
        return s | {"lse": prefill_attention(s["q"], s["k"], s["v"], SCALE, return_lse=True)[1]}

    def every(s: dict, config: dict | None = None) -> Tensor:
        return column_sums(s["q"], s["k"], SCALE, None, "sum", "triton", lse=s["lse"], config=config)

    runs = dense_prefills(length) | {
        # one product per pair instead of two
        "all queries": Run(every, tflop=prefill_tflop(length) / 2, ours=True, config=every),
        "last 64, no LSE": Run(lambda s: column_sums(s["q"], s["k"], SCALE, 64, "sum", "triton"), ours=True),
    }
    target = Target(
        "x best dense prefill",
        lambda ms, copy: ms["all queries"] / min(ms[name] for name in ("sdpa flash", "sdpa cudnn") if name in ms),
        0.65, False, "all queries",
    )  # fmt: skip
    return Problem(make, runs, [target], num_sets=1)


# slots ----------------------------------------------------------------------------------------------------------------


def selected(rows: int, length: int, share: float, max_us: float | None) -> Problem:
    from kernels.select import select

    num_kept = int(length * share)

    def make() -> dict:
        # attention mass: heavy tail, all positive
        scores = (torch.randn(rows, length, device=DEVICE) * 2).softmax(-1)
        return {"scores": scores, "lengths": full(rows, length)}

    def ours(s: dict, config: dict | None = None) -> Tensor:
        return select(s["scores"], num_kept, 4, 64, "triton", config=config)

    gbytes = rows * (length + num_kept) * 4 / 1e9
    runs = {
        "triton": Run(ours, gbytes, ours=True, config=ours, like="reference", tolerance=0),
        "triton, ragged": Run(
            lambda s: select(s["scores"], num_kept, 4, 64, "triton", lengths=s["lengths"]), gbytes, ours=True, like="reference",
            tolerance=0,
        ),
        "torch.topk": Run(lambda s: s["scores"].topk(num_kept, sorted=False).indices, gbytes),
        "torch.topk + sort": Run(lambda s: s["scores"].topk(num_kept, sorted=False).indices.sort(-1).values, gbytes),
        "reference": Run(lambda s: select(s["scores"], num_kept, 4, 64), gbytes),
    }  # fmt: skip
    targets = [Target("us", lambda ms, copy: ms["triton"] * 1e3, max_us, at_least=False)] if max_us else []
    return Problem(make, runs, targets)


def compacted(batch: int, num_kv_heads: int, length: int, share: float) -> Problem:
    from kernels.compact import compact

    num_kept = int(length * share)

    def make() -> dict:
        index = torch.rand(batch, num_kv_heads, length, device=DEVICE).argsort(-1)[..., :num_kept].sort(-1).values
        return {"k": randn(batch, num_kv_heads, length, DIM), "index": index.int(), "long": index}

    def ours(s: dict, config: dict | None = None) -> Tensor:
        return compact(s["k"], s["index"], impl="triton", config=config)

    # every row is read and written
    gbytes = kv_gbytes(batch, num_kv_heads, num_kept)
    runs = {
        "triton": Run(ours, gbytes, ours=True, config=ours, like="torch.gather", tolerance=0),
        "torch.gather": Run(lambda s: s["k"].gather(2, s["long"][..., None].expand(-1, -1, -1, DIM)), gbytes),
    }
    return Problem(make, runs)


def appended(batch: int, num_kv_heads: int) -> Problem:
    from kernels.append import append

    def make() -> dict:
        slots = (batch, num_kv_heads, 1024, DIM)
        s = {
            "ks": randn(*slots),
            "vs": randn(*slots),
            "k": randn(batch, num_kv_heads, DIM),
            "v": randn(batch, num_kv_heads, DIM),
        }
        return s | {"slot": torch.randint(1024, (batch,), device=DEVICE)}

    runs = {"triton": Run(lambda s: append(s["ks"], s["vs"], s["k"], s["v"], s["slot"], "triton"), ours=True)}
    runs["torch"] = Run(lambda s: append(s["ks"], s["vs"], s["k"], s["v"], s["slot"]))
    return Problem(make, runs)


# one decode step ------------------------------------------------------------------------------------------------------


def by_impl(make: Callable[[], dict], call: Callable[[dict, str], object], check: bool = True) -> Problem:
    """An op against its PyTorch twin."""
    ours = Run(lambda s: call(s, "triton"), ours=True, like="torch" if check else None)
    return Problem(make, {"triton": ours, "torch": Run(lambda s: call(s, "reference"))})


def normed(batch: int) -> Problem:
    from kernels.add_rms_norm import add_rms_norm

    def make() -> dict:
        return {"x": randn(batch, 4096), "residual": randn(batch, 4096), "weight": randn(4096)}

    return by_impl(make, lambda s, impl: add_rms_norm(s["x"], s["residual"], s["weight"], 1e-5, impl)[0])


def gated(batch: int) -> Problem:
    from kernels.swiglu import swiglu

    return by_impl(lambda: {"x": randn(batch, 2 * 14336)}, lambda s, impl: swiglu(s["x"], impl))


def rotated(batch: int, num_kv_heads: int) -> Problem:
    from kernels.rope_append import rope_append

    def make() -> dict:
        slots = (batch, num_kv_heads, 1024, DIM)
        s = {"qkv": randn(batch, (NUM_HEADS + 2 * num_kv_heads) * DIM), "cos": randn(batch, DIM), "sin": randn(batch, DIM)}
        return s | {"k": randn(*slots), "v": randn(*slots), "slot": torch.randint(1024, (batch,), device=DEVICE)}

    return by_impl(make, lambda s, impl: rope_append(s["qkv"], s["cos"], s["sin"], s["k"], s["v"], s["slot"], impl=impl))


def cases(with_flex: bool = False) -> list[Case]:
    """Names: sequences x tokens, then KV heads where not 8."""

    def decode(batch: int, heads: int, length: int, targets: Callable) -> Callable[[], Problem]:
        return lambda: dense(batch, heads, length, targets, with_flex)

    formats = {"fp8": 1.75, "int8": 1.6, "int4": 2.3, "int4_token": None}
    return [
        Case("decode_attention", "8x32k", decode(8, 8, 32768, one_gib), main=True),
        Case("decode_attention", "16x32k, 4 KV heads", decode(16, 4, 32768, one_gib)),
        Case("decode_attention", "1x32k", decode(1, 8, 32768, batch_one), main=True),
        Case("decode_attention", "1x128k", decode(1, 8, 131072, batch_one)),
        Case("decode_attention", "32x8k", decode(32, 8, 8192, many_short), main=True),
        Case("decode_attention", "8x32k keep 20%", lambda: kept(8, 8, 32768, 0.2, 4.0), main=True),
        Case("decode_attention", "16x32k, 4 KV heads, keep 20%", lambda: kept(16, 4, 32768, 0.2, 4.0)),
        Case("decode_attention", "8x32k keep 50%", lambda: kept(8, 8, 32768, 0.5, None)),
        Case("decode_attention", "8x32k keep 10%", lambda: kept(8, 8, 32768, 0.1, None)),
        Case("decode_attention", "8x32k blocks 20%", lambda: kept_blocks(8, 8, 32768, 0.2)),
        Case("decode_attention_quant", "8x32k", lambda: quantised(8, 8, 32768, formats | {"mixed": None}), main=True),
        Case("decode_attention_quant", "1x32k", lambda: quantised(1, 8, 32768, dict.fromkeys(formats))),
        Case("decode_attention_quant", "32x8k", lambda: quantised(32, 8, 8192, dict.fromkeys(formats))),
        Case("h2o_update", "8x32k", lambda: h2o(8, 8, 32768), main=True),
        Case("prefill_attention", "16k", lambda: dense_prefill(8, 16384), main=True),
        Case("prefill_attention", "32k", lambda: dense_prefill(8, 32768)),
        Case(
            "prefill_attention", "16k block sparse", lambda: block_sparse(8, 16384, {0.5: 1.6, 0.25: 3.0, 0.1: None}), main=True
        ),
        Case("prefill_attention", "32k block sparse", lambda: block_sparse(8, 32768, {0.5: 1.6, 0.25: 3.0, 0.1: None})),
        Case("rows_attention", "16k", lambda: regrouped(8, 16384, {0.5: None, 0.25: None}), main=True),
        Case("column_sums", "16k", lambda: summed_columns(8, 16384), main=True),
        Case("column_sums", "32k", lambda: summed_columns(8, 32768)),
        Case("select", "8x32k keep 20%", lambda: selected(8, 32768, 0.2, 20.0), main=True),
        Case("select", "64x32k keep 20%", lambda: selected(64, 32768, 0.2, None)),
        Case("select", "64x2k keep 20%", lambda: selected(64, 2048, 0.2, None)),
        Case("select", "8x128k keep 20%", lambda: selected(8, 131072, 0.2, None)),
        Case("compact", "8x32k keep 20%", lambda: compacted(8, 8, 32768, 0.2), main=True),
        Case("append", "8 sequences", lambda: appended(8, 8)),
        Case("append_quant", "8 sequences", lambda: appended_quant(8, 8, ("fp8", "int8", "int4", "int4_token"))),
        Case("quantize", "1x32k", lambda: written(1, 8, 32768, ("fp8", "int8", "int4", "int4_token"))),
        Case("add_rms_norm", "8 sequences", lambda: normed(8)),
        Case("rope_append", "8 sequences", lambda: rotated(8, 8)),
        Case("swiglu", "8 sequences", lambda: gated(8)),
    ]
