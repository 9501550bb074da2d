"""Linear layers of four bits: the numbers of bitsandbytes' own, from parameters that can be sharded and moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

bitsandbytes = pytest.importorskip("bitsandbytes", reason="weights of four bits are bitsandbytes'")

from autolaunch.models.four_bits import FourBitLinear, quantise_linear_layers  # noqa: E402 - behind the skip
from autolaunch_strategies.config import ConfigError  # noqa: E402 - behind the skip
from autolaunch_strategies.model.construction import Construction  # noqa: E402 - behind the skip
from autolaunch_strategies.model.counts import count_parameters  # noqa: E402 - behind the skip
from tests.support.messages import assert_told  # noqa: E402 - behind the skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_it_computes_what_bitsandbytes_own_layer_does(quant_type: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, dtype=dtype)
    ours = FourBitLinear(layer, quant_type)
    own = bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=dtype, compress_statistics=False, quant_type=quant_type)
    own.load_state_dict(layer.state_dict())
    own.to("cpu")
    results = []
    for module in (ours.to(torch.float16).to(dtype), own):  # bits are no numbers: no conversion reaches them
        x = torch.randn(3, 64, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x)
        y.sum().backward()
        assert x.grad is not None and x.grad.abs().sum() > 0
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1])
    assert ours.weight.dtype == ours.absmax.dtype == dtype  # sharded training would lose bytes without a word
    assert ours.weight.nbytes == 32 * 64 // 2 and ours.absmax.nbytes == 32 * 64 // 64 * 4
    assert count_parameters(ours).parameters == 32 * 64 + 32


def test_a_recorded_layer_is_quantised_when_it_is_made() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model.replaced = quantise_linear_layers(model, "nf4", ["1"])
        return model

    construction = Construction(3)
    with construction.recording():
        model = make()
    assert type(model[1]) is nn.Linear and set(model.replaced) == {"0.weight"}
    whole = torch.randn(16, 16)
    construction.give(model.replaced["0.weight"], lambda: whole)
    reference = nn.Linear(16, 16)
    reference.weight.data.copy_(whole)
    expected = FourBitLinear(reference, "nf4")
    for name in ("weight", "absmax"):
        bits = construction.tensor(getattr(model[0], name)).view(torch.int32)
        assert torch.equal(bits, getattr(expected, name).view(torch.int32))


@pytest.mark.parametrize(
    ("model", "what"), [(nn.Sequential(nn.Linear(3, 3)), "0"), (nn.Sequential(nn.Embedding(4, 4)), "torch.nn.Linear")]
)
def test_what_cannot_have_four_bits_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        quantise_linear_layers(model, "nf4")
    assert_told(error.value, "adapter=qlora", what, write="adapter=lora")
