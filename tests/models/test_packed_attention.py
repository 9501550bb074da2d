"""Which kernel computes attention of packed documents, why, and what models do that are told to use it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autolaunch.models import build_model
from autolaunch.models.packed_attention import OURS, settle
from autolaunch.report.screen import _packing
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model import document_attention
from tests.models.label_cases import LLAMA
from tests.support.documents import kernel_on_cpu

CPU = torch.device("cpu")
LLAMA_CFG = {**LLAMA, "packed_attention": "auto"}
HF_CFG = {"name": "hf", "task": "causal_lm", "attn_implementation": "sdpa", "packed_attention": "auto"}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GEMMA = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def job(model: dict[str, Any], **keys: Any) -> dict[str, Any]:
    data = {"name": "documents", "packing": "documents"}
    return {"module": None, "model": model, "data": data, "precision": "bf16-mixed", "mesh": {"cp": 1}, **keys}


def transformers_model(family: str = "llama", **fields: Any) -> nn.Module:
    pytest.importorskip("transformers")
    return build_model({**HF_CFG, "config": {"model_type": family, **SIZES, **fields}})


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        pytest.param(job(LLAMA_CFG), "varlen", "nothing is computed between documents", id="ours"),
        pytest.param(job(LLAMA_CFG, precision="float8"), "varlen", "nothing is computed", id="float8"),
        pytest.param(job(LLAMA_CFG, data={"_target_": "mine.Data"}), "varlen", "nothing is computed", id="own-data"),
        pytest.param(job({**LLAMA_CFG, "packed_attention": "sdpa"}), "sdpa", "packed_attention=sdpa", id="turned-off"),
        pytest.param(job(LLAMA_CFG, precision="32-true"), "sdpa", "bf16 and fp16 (precision=32-true)", id="fp32"),
        pytest.param(job(LLAMA_CFG, mesh={"cp": 2}), "sdpa", "along cp", id="cp"),
        pytest.param(job({**HF_CFG, "attn_implementation": "eager"}), "sdpa", "attn_implementation=eager", id="eager"),
    ],
)
def test_the_kernel_is_chosen_where_it_can_be(config: dict[str, Any], kernel: str, reason: str) -> None:
    model: Any = build_model(LLAMA)
    with kernel_on_cpu():
        chosen = settle(config, model, CPU)
    assert chosen is not None and chosen.kernel == kernel and reason in chosen.reason
    assert model.model.documents_by_kernel == (kernel == "varlen")
    shown = _packing(config, chosen.account())
    assert ("_target_" in config["data"] and not shown) or (kernel in shown and reason in shown)


def test_it_is_not_chosen_where_there_is_no_such_choice() -> None:
    for config in (
        job(LLAMA_CFG, data={"name": "documents", "packing": "none"}),
        job(LLAMA_CFG, module={"_target_": "mine.Module"}),
        job({"_target_": "mine.Model"}),
    ):
        assert settle(config, nn.Linear(1, 1), CPU) is None


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        pytest.param(None, "no kernel for it on cpu", id="cpu"),
        pytest.param({"version": "6.4"}, "GPUs of AMD", id="amd"),
        pytest.param({"capability": (7, 5)}, "T4 is older than the flash kernels", id="old"),
        pytest.param({"flash": False}, "this build of torch has no flash kernels", id="without"),
        pytest.param({}, None, id="has-it"),
    ],
)
def test_devices(cuda: dict[str, Any] | None, reason: str | None) -> None:
    device: Any = CPU if cuda is None else SimpleNamespace(type="cuda")
    facts = {"version": None, "capability": (9, 0), "flash": True, **(cuda or {})}
    with (
        mock.patch.object(torch.version, "hip", facts["version"]),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: facts["capability"]),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "T4"),
        mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: facts["flash"]),
    ):
        said = document_attention.device_reason(device)
    assert said is None if reason is None else reason in str(said)


def test_asked_for_where_it_can_not_be() -> None:
    with pytest.raises(ConfigError, match=r"model\.packed_attention=varlen: there is no kernel for it on cpu"):
        settle(job({**LLAMA_CFG, "packed_attention": "varlen"}), build_model(LLAMA), CPU)


def test_models_of_transformers_get_documents_for_a_mask_only_where_that_is_all() -> None:
    model: Any = transformers_model("gemma3_text", **GEMMA)
    masks: dict[str, list[Any]] = {"sliding_attention": [], "full_attention": []}
    for layer, kind in zip(model.model.layers, masks, strict=True):
        hook = masks[kind].append
        layer.register_forward_pre_hook(
            lambda _, __, kwargs, hook=hook: hook(kwargs["attention_mask"]), with_kwargs=True
        )
    ids, positions = torch.arange(6)[None], torch.tensor([[0, 1, 2, 3, 0, 1]])
    with kernel_on_cpu():
        chosen = settle(job(HF_CFG), model, CPU)
        assert chosen is not None and chosen.reason.endswith("; layers with a sliding window have sdpa with a mask")
        assert model.config._attn_implementation == OURS
        model(ids, position_ids=positions)  # packed
        model(ids)  # one document
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]))  # padding
    window, full = masks["sliding_attention"], masks["full_attention"]
    assert [None if mask is None else mask.dtype for mask in window] == [torch.bool] * 3
    assert full[0].dtype == torch.int32 and full[0].flatten().tolist() == [0, 0, 0, 0, 4, 4]
    assert full[1] is None and full[2].dtype == torch.bool


def test_a_model_whose_attention_can_not_be_replaced_keeps_its_own() -> None:
    model: Any = transformers_model()
    with kernel_on_cpu(), mock.patch.object(type(model), "_supports_flash_attn", False):
        chosen = settle(job(HF_CFG), model, CPU)
    assert chosen is not None and (chosen.kernel, model.config._attn_implementation) == ("sdpa", "sdpa")
    assert chosen.reason == "LlamaForCausalLM has no attention that can be replaced"
