"""model=llama: the published shapes, the arithmetic of transformers, and what is said about shapes that do not fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autolaunch.config.schema import LlamaModel
from autolaunch.models import llama
from autolaunch.models.facts import ModelFacts, model_facts
from autolaunch.models.llama import Llama, RotaryEmbedding
from autolaunch.models.llama_config import SIZES, llama_config
from autolaunch_strategies.config import ConfigError, ConfigErrors
from autolaunch_strategies.torch_private.attention import with_heads_for_kernels
from tests.support.messages import Told, assert_only_told

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 64}


@pytest.mark.parametrize(
    ("autocast", "masked", "key_heads"),
    [
        pytest.param(True, False, 2, id="flash attention takes two"),
        pytest.param(False, False, 4, id="fp32"),
        pytest.param(True, True, 4, id="mask"),
    ],
)
def test_keys_have_as_many_heads_as_the_kernels_of_a_gpu_need(
    monkeypatch: pytest.MonkeyPatch, autocast: bool, masked: bool, key_heads: int
) -> None:
    """Else torch writes all scores to memory. A CPU stands in for the GPU: it takes either."""
    config = llama_config({"vocab_size": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2})
    torch.manual_seed(0)
    attention = llama.Attention(config)
    angles = torch.randn(6, config.head_dim)
    arguments = torch.randn(2, 6, 32), angles.cos(), angles.sin(), torch.ones(6, 6).tril().bool() if masked else None
    shapes: list[torch.Size] = []
    attend = F.scaled_dot_product_attention

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.extend((q.shape, k.shape, v.shape))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = attention(*arguments)
        assert [shape[1] for shape in shapes] == [4, 2, 2], "a CPU takes fewer heads in all types"
        on_gpu = partial(with_heads_for_kernels, device_type="cuda")
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        monkeypatch.setattr(llama, "with_heads_for_kernels", on_gpu)
        found = attention(*arguments)
    assert [shape[1] for shape in shapes[3:]] == [4, key_heads, key_heads]
    torch.testing.assert_close(found, expected)


def of_transformers(model: Llama) -> torch.nn.Module:
    """transformers' own class with the shape and the weights of `model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.config
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_seq_len,
        }
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_seq_len,
        rope_parameters=rope,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
    )
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(model.state_dict(), strict=True)
    return theirs


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param({}, id="grouped-heads"),
        pytest.param({"num_kv_heads": 4}, id="as-many-kv-heads"),
        pytest.param({"num_kv_heads": 1, "tie_embeddings": True}, id="one-kv-head-tied"),
        pytest.param({"rope_scaling": SCALING, "rope_theta": 500_000.0}, id="rope-scaling"),
        pytest.param({"head_dim": 48, "norm_eps": 1e-2}, id="own-head-dim"),
    ],
)
def test_logits_and_gradients_equal_transformers(cfg: dict) -> None:
    torch.manual_seed(1)
    ours = Llama(llama_config({"num_layers": 2, "init_std": 0.1, **cfg}))
    for parameter in ours.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)  # norms of one would hide a norm that is not applied
    theirs = of_transformers(ours)
    ids = torch.randint(0, 320, (2, 97))
    expected, logits = theirs(ids).logits, ours(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for result in (expected, logits):
        F.cross_entropy(result[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    pairs = dict(theirs.named_parameters())
    assert list(pairs) == [name for name, _ in ours.named_parameters()]
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, pairs[name].grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_position_ids_are_used() -> None:
    torch.manual_seed(2)
    ours = Llama(llama_config({"num_layers": 1, "init_std": 0.1}))
    ids, positions = torch.randint(0, 320, (2, 9)), torch.tensor([[3, 4, 5, 6, 0, 1, 2, 3, 4], [*range(9)]])
    # Without a mask transformers takes positions that start again for packed documents, as we do.
    expected = of_transformers(ours)(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours(ids, positions), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours(ids)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("debug", 869_504),
        ("1b", 1_235_814_400),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_parameter_counts(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(llama_config({"size": size}))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_initial_weights_and_tied_embeddings() -> None:
    torch.manual_seed(0)
    model = Llama(llama_config({"tie_embeddings": True, "init_std": 0.05, "num_layers": 1}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert abs(parameter.mean().item()) < 0.002 and 0.048 < parameter.std().item() < 0.052, name


def test_rotary_frequencies_stay_exact_in_bfloat16() -> None:
    config = llama_config({"size": "8b"})
    exact, narrow = RotaryEmbedding(config), RotaryEmbedding(config).to(torch.bfloat16)
    assert narrow.inv_freq.dtype == torch.float32
    assert torch.equal(exact.inv_freq, narrow.inv_freq)
    assert not exact.state_dict()
    half = Llama(llama_config({"num_layers": 1})).to(torch.bfloat16)
    assert half(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_the_model_learns() -> None:
    torch.manual_seed(0)
    model = Llama(llama_config({"num_layers": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(65) * 7 % 32)[None].repeat(4, 1)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5 and losses[-1] < 0.5


def test_facts_follow_the_size_and_the_overrides() -> None:
    assert model_facts({"name": "llama", "size": "70b", "num_layers": 4}) == ModelFacts(
        "llama", 4, 64, 8, 8192, 28_672, 128_256, 131_072, num_experts=0
    )


def test_null_means_the_sizes_own_and_empty_scaling_means_none() -> None:
    assert llama_config(vars(LlamaModel(size="8b"))) == llama_config({"size": "8b"})
    assert llama_config({"size": "8b"}).rope_scaling is not None
    assert llama_config({"size": "8b", "rope_scaling": {}}).rope_scaling is None
    assert set(SIZES) == {"debug", "1b", "8b", "70b", "405b"}


KEYS = "factor, low_freq_factor, high_freq_factor, original_max_seq_len"


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        pytest.param(
            {"size": "7b"},
            Told("model.size=7b", "no such size", allowed="debug, 1b, 8b, 70b, 405b"),
            id="size",
        ),
        pytest.param(
            {"num_heads": 5, "num_kv_heads": 5},
            Told(
                "model.num_heads=5",
                "divide",
                "model.hidden_size=128",
                "model.head_dim",
                allowed="a divisor of 128",
                write="model.num_heads=4",
            ),
            id="heads",
        ),
        pytest.param(
            {"num_kv_heads": 3},
            Told(
                "model.num_kv_heads=3",
                "key/value head",
                "divide",
                "model.num_heads=4",
                allowed="a divisor of 4",
                write="model.num_kv_heads=2",
            ),
            id="kv-heads",
        ),
        pytest.param(
            {"num_heads": 1},
            Told(
                "model.num_kv_heads=2",
                "key/value head",
                "size debug",
                "divide",
                "model.num_heads=1",
                allowed="a divisor of 1",
                write="model.num_kv_heads=1",
            ),
            id="kv-heads-of-the-size",
        ),
        pytest.param(
            {"head_dim": 33},
            Told("model.head_dim=33", "even", allowed="an even number"),
            id="odd-head-dim",
        ),
        pytest.param(
            {"hidden_size": 36},
            Told("model.head_dim=9", "even", "hidden_size / num_heads", allowed="an even number"),
            id="odd-derived-head-dim",
        ),
        pytest.param(
            {"rope_scaling": {**SCALING, "high_freq": 4.0}},
            Told("model.rope_scaling.high_freq", "model.rope_scaling.high_freq_factor", allowed=KEYS),
            id="scaling-unknown-key",
        ),
        pytest.param(
            {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0}},
            Told("model.rope_scaling", "high_freq_factor", "original_max_seq_len", allowed=(KEYS, "{}")),
            id="scaling-missing-keys",
        ),
        pytest.param(
            {"rope_scaling": {**SCALING, "factor": "big"}},
            Told("model.rope_scaling.factor=big", "positive", allowed="a number above 0"),
            id="scaling-not-a-number",
        ),
        pytest.param(
            {"rope_scaling": {**SCALING, "low_freq_factor": 4.0}},
            Told(
                "model.rope_scaling.low_freq_factor=4.0",
                "below",
                "model.rope_scaling.high_freq_factor=4.0",
                allowed=("low_freq_factor < high_freq_factor",),
            ),
            id="scaling-order",
        ),
    ],
)
def test_shapes_that_do_not_fit(cfg: dict, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        model_facts({"name": "llama", **cfg})
    assert_only_told(caught.value, told)


def test_several_problems_come_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        model_facts({"name": "llama", "num_heads": 5})
    told = [
        Told("model.num_heads=5", "model.hidden_size=128", write="model.num_heads=4"),
        Told("model.num_kv_heads=2", "model.num_heads=5", write="model.num_kv_heads=1"),
    ]
    assert_only_told(caught.value, told)
