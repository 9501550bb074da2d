"""Whether a model of `transformers` keeps the documents of a packed row apart, which some do not, and do not say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.blocks import find_blocks


class _Asked(Exception):
    """The model asks where documents begin."""


class _Made(Exception):
    """Masks have been made: the first block runs."""


def check_keeps_documents_apart(model: nn.Module, longest: int | None = None) -> None:
    """Refuse a model for `data.packing=documents` whose documents would see each other.

    Args:
        longest: how many tokens a document may have.

    Raises:
        ConfigError: as `why_documents_meet` has it.
    """
    if why := why_documents_meet(model, longest):
        raise ConfigError("data.packing=documents", why, "none: a row for each", "data.packing=none")


def why_documents_meet(model: nn.Module, longest: int | None = None) -> str:
    """Why the documents of a packed row would see each other in a model; empty if they would not.

    It carries a state from token to token, makes its mask without looking at `position_ids`, or chooses its rotations
    by the longest document of a batch, which is another one on each rank.

    Args:
        longest: how many tokens a document may have; None if nobody knows.
    """
    transformers = sys.modules.get("transformers")
    kind = () if transformers is None else transformers.PreTrainedModel
    transformers_model = next((module for module in model.modules() if isinstance(module, kind)), None)
    if transformers_model is None:
        return ""
    name = type(transformers_model).__name__
    layers = getattr(transformers_model.config.get_text_config(), "layer_types", None) or ()
    if getattr(transformers_model, "_is_stateful", False) or any(_carries_state(layer) for layer in layers):
        return f"{name} carries a state from token to token, and so from document to document"
    kind_of_rope, tokens = _rotates_by_the_longest(transformers_model.config.get_text_config())
    if kind_of_rope and (longest is None or longest > tokens):
        return (
            f"{name} (rope_type={kind_of_rope}) rotates all documents of a batch in another way once one of them has "
            f"more than {tokens} tokens"
        )
    if _asks_for_documents(transformers_model) is False:
        return f"{name} makes its attention mask without position_ids, so that documents would see each other"
    return ""


def _rotates_by_the_longest(config: Any) -> tuple[str, int]:
    """(the rope_type that looks at the largest of all positions, above how many tokens); "" if there is none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind, usual = rope.get("rope_type"), getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            return kind, rope.get("original_max_position_embeddings") or usual
        if kind == "dynamic":
            return kind, usual
    return "", 0


def _carries_state(layer_type: str) -> bool:
    """Whether a layer of this kind is a recurrence or a convolution over the sequence."""
    return not layer_type.endswith("attention") or layer_type.startswith("linear")


def _asks_for_documents(model: nn.Module) -> bool | None:
    """Whether the model looks for documents when it makes masks, in front of its first block; None if that fails."""
    from transformers import masking_utils

    original = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:
        return None
    with ExitStack() as stack:
        stack.callback(setattr, masking_utils, "find_packed_sequence_indices", original)
        masking_utils.find_packed_sequence_indices = _raise(_Asked)
        for block in find_blocks(model):
            stack.callback(block.module.register_forward_pre_hook(_raise(_Made)).remove)
        device = next((parameter.device for parameter in model.parameters()), None)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        try:
            with torch.no_grad():
                model(ids, position_ids=ids, use_cache=False)
        except _Asked:
            return True
        except _Made:
            return False
        except Exception:
            return None
    return False


def _raise(error: type[Exception]) -> Callable[..., None]:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising
