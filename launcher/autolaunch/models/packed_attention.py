"""Which kernel computes attention of packed documents, and models that are told to use it. Imports torch only then."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autolaunch.models.hf_tasks import task_of
from autolaunch_strategies.config import ConfigError, lightning_precision

if TYPE_CHECKING:
    import torch
    from torch import nn

PACKED_KERNELS = ("auto", "varlen", "sdpa")
"""Values of `model.packed_attention`."""

OURS = "autolaunch_documents"
"""What `transformers` calls the attention that is registered there."""

NOT_PACKED = "there are no packed documents without data.packing=documents"
"""What is said of data that keep each document in a row of its own."""

_WINDOWS = "layers with a sliding window have sdpa with a mask"


@dataclass(frozen=True)
class PackedAttention:
    """What computes attention of packed documents in a run, and why."""

    kernel: str
    """varlen or sdpa."""
    reason: str

    def account(self) -> dict[str, dict[str, str]]:
        """As plan.yaml has it."""
        return {"packed_attention": {"kernel": self.kernel, "reason": self.reason}}


def may_pack(config: Mapping[str, Any]) -> bool:
    """Whether rows of a job's data may hold several documents: only data of one's own do not say."""
    return config["data"].get("packing") == "documents" or "_target_" in config["data"]


def reason_of_config(config: Mapping[str, Any], cp: int) -> str | None:
    """Why a job can't compute packed documents by the kernel for them, as far as its keys say it; None if it can.

    Args:
        cp: ranks that share a sequence.
    """
    model, precision = config["model"], config["precision"]
    if not may_pack(config):
        return NOT_PACKED
    if cp > 1:
        return "along cp documents are kept apart by what computes attention there"
    if "16" not in str(lightning_precision(precision)):
        return f"the kernel computes in bf16 and fp16 (precision={precision})"
    if model.get("name") == "hf":
        if model["attn_implementation"] not in (None, "sdpa"):
            return f"model.attn_implementation={model['attn_implementation']} computes it"
        if task_of(model) != "causal_lm":
            return f"model.task={model['task']} has no packed documents"
    return None


def settle(config: Mapping[str, Any], model: nn.Module, device: torch.device | None) -> PackedAttention | None:
    """Choose what computes attention of packed documents, and let `model` use it.

    Args:
        config: the fields of `autolaunch.config.schema.Job`.
        device: where the model will run; None if that is not known here: a GPU that has the kernel.

    Returns:
        None for a job that has no such choice: no packed documents, or a model or module of one's own.

    Raises:
        ConfigError: `model.packed_attention=varlen` where it can't be.
    """
    from autolaunch_strategies.model.document_attention import device_reason

    wanted = config["model"].get("packed_attention")
    if wanted is None or "_target_" in config["model"] or config["module"] is not None or not may_pack(config):
        return None
    if wanted == "sdpa":
        return PackedAttention("sdpa", "model.packed_attention=sdpa")
    reason = reason_of_config(config, config["mesh"]["cp"])
    if reason is None and device is not None:
        reason = device_reason(device)
    if reason is None:
        reason = use_kernel(model)
    if reason is None:
        where = "on GPUs that have it, " if device is None else ""
        return PackedAttention("varlen", f"{where}nothing is computed between documents{_but_windows(model)}")
    if wanted == "varlen":
        raise refusal(reason, "model.packed_attention=varlen")
    return PackedAttention("sdpa", reason)


def refusal(reason: str, key: str) -> ConfigError:
    """What is said where `model.packed_attention=varlen` can't be."""
    return ConfigError(key, reason, "auto (varlen wherever it can be), sdpa", "model.packed_attention=auto")


def use_kernel(model: nn.Module) -> str | None:
    """Let attention of packed documents in `model` be computed by `document_attention`; why not, if it can't be."""
    from autolaunch.models.llama import Decoder

    transformers = sys.modules.get("transformers")
    found = False
    for module in model.modules():
        if isinstance(module, Decoder):
            module.documents_by_kernel = found = True
        elif not found and transformers is not None and isinstance(module, transformers.PreTrainedModel):
            # What it takes as a mask, and that a window or a cap of scores is no part of it, goes by these.
            if not (module._supports_flash_attn and module._supports_sdpa and module._supports_attention_backend):
                return f"{type(module).__name__} has no attention that can be replaced"
            _register(transformers)
            module.set_attn_implementation(OURS)
            if module.config._attn_implementation != OURS:
                return f"{type(module).__name__} has no attention that can be replaced"
            found = True
    return None if found else f"{type(model).__name__} is not known to have it"


def _but_windows(model: nn.Module) -> str:
    for module in model.modules():
        layers = getattr(getattr(module, "config", None), "layer_types", None) or ()
        if any("full" not in str(layer) for layer in layers):
            return f"; {_WINDOWS}"
    return ""


def _register(transformers: Any) -> None:
    transformers.AttentionInterface.register(OURS, _attend)
    transformers.AttentionMaskInterface.register(OURS, _mask)


def _mask(**given: Any) -> Any:
    """As `sdpa_mask`; for a causal mask within documents and nothing else, the documents themselves."""
    from transformers.masking_utils import sdpa_mask

    from autolaunch_strategies.model.document_attention import documents_of

    numbers = _numbers_of_documents(given.get("mask_function"))
    if numbers is None or given.get("attention_mask") is not None or given.get("kv_length") != given.get("q_length"):
        return sdpa_mask(**given)
    begins = numbers.diff(prepend=numbers[:, :1]) != 0
    return documents_of(begins.expand(given["batch_size"], -1))


def _numbers_of_documents(mask_function: Callable[..., Any] | None) -> torch.Tensor | None:
    """The number of each token's document, [b, s], if that and the order of tokens is all that a mask goes by.

    `transformers` composes masks of functions. What it composes otherwise than known here stays a mask.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or _maker(mask_function) != "and_masks":
        return None
    parts = {_maker(part): _kept_by(part) for part in _kept_by(mask_function).get("mask_functions", ())}
    if parts.keys() != {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}:
        return None
    if parts["remap_positions_for_packed_sequence"].get("mask_function") is not causal_mask_function:
        return None
    return parts["packed_sequence_mask_function"].get("packed_sequence_mask")


def _maker(function: Callable[..., Any]) -> str:
    """The name of the function that made this one."""
    return str(getattr(function, "__qualname__", "")).partition(".<locals>")[0]


def _kept_by(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function has from the one that made it, by name."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _attend(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any
) -> tuple[Any, None]:
    """As `sdpa_attention_forward`; by `document_attention` where the mask is documents."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from autolaunch_strategies.model.document_attention import document_attention, is_documents, mask_of

    if is_documents(attention_mask):
        if not dropout and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux")):
            out = document_attention(query, key, value, attention_mask, scale=kwargs.get("scaling"))
            return out.transpose(1, 2).contiguous(), None
        attention_mask = mask_of(attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
