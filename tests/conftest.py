"""Fixtures shared by all tests; the environment is set before anything imports Triton or wandb."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import pytest  # noqa: E402

from harness.models import Loaded, ModelConf, load  # noqa: E402

# threads that outnumber the cores wait for each other
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The real default model on CPU in fp32."""
    return load(ModelConf(device="cpu", dtype="fp32"))


@pytest.fixture(scope="session")
def tiny_llama():
    """Factory of random Llama models on CPU in fp32; keyword arguments are LlamaConfig fields.

    The weights are wide enough (std 1/8) that attention is far from uniform, so that a lost token shows.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 0, **fields) -> LlamaForCausalLM:
        shape = {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
            "initializer_range": 0.125,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**(shape | fields)))
        return model.eval().requires_grad_(False)

    return make
