"""What a batch of the built-in language model holds: labels, positions, masks, and which first batches are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autolaunch.data import build_data
from autolaunch.models.label_positions import labels_of
from autolaunch.models.labels import check_batch, next_tokens
from autolaunch.models.language_model import LanguageModel, cross_entropy
from autolaunch_strategies.config import ConfigError
from tests.models.test_training import trainer
from tests.support.messages import Told, assert_only_told

IDS = torch.tensor([[5, 3, 3, 8, 2], [1, 4, 9, 9, 7]])
FOLLOWING = torch.cat([IDS[:, 1:], torch.tensor([[6], [6]])], dim=1)
BOTH = ("position_ids", "attention_mask")


def masked(labels: torch.Tensor, *positions: int) -> torch.Tensor:
    labels = labels.clone()
    labels[:, list(positions)] = -100
    return labels


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        ({"name": "text"}, "next"), ({"name": "tokens"}, "next"), ({"name": "synthetic"}, "next"),
        ({"name": "custom", "_target_": "a.B", "labels": None}, "same"), ({"name": "text", "_target_": "a.B"}, "same"),
        ({"name": "custom", "_target_": "a.B", "labels": "next"}, "next"), ({"name": "documents"}, "same"),
    ],
)  # fmt: skip
def test_where_labels_of_data_stand(data: dict[str, Any], labels: str) -> None:
    assert labels_of(data) == labels


def test_a_data_module_is_not_given_the_key() -> None:
    made: Any = build_data({"name": "custom", "_target_": "collections.OrderedDict", "labels": "next", "a": 1}, 0)
    assert dict(made) == {"a": 1}


def test_both_positions_of_labels_train_the_same() -> None:
    module = {kind: LanguageModel(Bigrams(), {}, {}, 1, labels=kind) for kind in ("next", "same")}
    module["same"].load_state_dict(module["next"].state_dict())
    same, following = (
        {"input_ids": IDS, "labels": masked(IDS, 2)},
        {"input_ids": IDS, "labels": masked(FOLLOWING, 1, 4)},
    )
    torch.testing.assert_close(module["same"]._loss(same), module["next"]._loss(following))
    assert module["same"].num_items_in_batch(same) == module["next"].num_items_in_batch(following) == 6


def test_first_tokens_of_packed_documents_follow_from_nothing() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    same = {"input_ids": IDS, "labels": IDS, "position_ids": positions}
    assert next_tokens(same, "same").tolist() == [[3, -100, 8, 2, -100], [4, 9, 9, 7, -100]]
    following = {**same, "labels": FOLLOWING}
    assert next_tokens(following, "next").tolist() == [[3, -100, 8, 2, 6], [4, 9, 9, 7, 6]]


def test_without_a_label_the_loss_is_zero_and_so_are_gradients() -> None:
    module = LanguageModel(Bigrams(), {}, {}, 1)
    loss = module._loss({"input_ids": IDS, "labels": masked(IDS, 0, 1, 2, 3, 4)})
    loss.backward()
    assert loss == 0 and module.model.table.weight.grad.abs().max() == 0
    assert cross_entropy(torch.randn(2, 3), torch.tensor([-100, -100])) == 0


LEFT, RIGHT = torch.tensor([[0, 1, 1, 1, 1]] * 2), torch.tensor([[1, 1, 1, 0, 0]] * 2)


@pytest.mark.parametrize(
    ("labels", "batch"),
    [
        pytest.param("next", {"labels": masked(FOLLOWING, 0, 3)}, id="next"),
        pytest.param("same", {"labels": masked(IDS, 0, 3)}, id="same"),
        pytest.param("next", {"labels": masked(IDS, 0, 1, 2, 3, 4)}, id="no-labels-next"),
        pytest.param("same", {"labels": masked(IDS, 0, 1, 2, 3, 4)}, id="no-labels-same"),
        pytest.param("same", {"labels": torch.full_like(IDS, 3)}, id="something-else"),
        pytest.param("same", {"labels": masked(IDS, 3, 4), "attention_mask": RIGHT}, id="padded-same"),
        pytest.param("next", {"labels": masked(FOLLOWING, 2, 3, 4), "attention_mask": RIGHT}, id="padded-next"),
        pytest.param("same", {"labels": IDS, "position_ids": torch.arange(5).expand(2, 5)}, id="positions"),
    ],
)
def test_batches_that_are_taken(labels: str, batch: dict[str, torch.Tensor]) -> None:
    check_batch({"input_ids": IDS, **batch}, labels, BOTH)


def test_one_token_over_and_over_fits_both() -> None:
    ids = torch.full((2, 5), 3)
    for labels in ("next", "same"):
        check_batch({"input_ids": ids, "labels": ids}, labels, ())


@pytest.mark.parametrize(
    ("labels", "batch", "told"),
    [
        pytest.param(
            "next", {"labels": masked(IDS, 0, 3)}, Told("data.labels=next", "copy", write="data.labels=same"), id="copy"
        ),
        pytest.param(
            "same", {"labels": masked(FOLLOWING, 1)}, Told("data.labels=same", "shifted", write="data.labels=next"),
            id="shifted-twice",
        ),
        pytest.param("same", {"targets": IDS}, Told("data", "input_ids, targets", allowed=("labels: [b",)), id="keys"),
        pytest.param("same", {"labels": IDS[:, 0]}, Told("data: labels", "[2]", "[2, 5]"), id="shape"),
        pytest.param("same", {"labels": IDS.int()}, Told("data: labels", "int32", allowed=("int64",)), id="type"),
        pytest.param(
            "same", {"labels": masked(IDS, 0), "attention_mask": LEFT},
            Told("data: attention_mask", "behind padding", allowed=("padding_side=right",)), id="left",
        ),
        pytest.param(
            "same", {"labels": masked(IDS, 4), "attention_mask": RIGHT},
            Told("data: labels", "padding", allowed=("-100",)), id="labels-of-padding",
        ),
        pytest.param(
            "next", {"labels": masked(FOLLOWING, 3, 4), "attention_mask": RIGHT},
            Told("data: labels", "padding", allowed=("-100",)), id="labels-of-padding-next",
        ),
    ],
)  # fmt: skip
def test_batches_that_are_refused(labels: str, batch: dict[str, torch.Tensor], told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch({"input_ids": IDS, **batch}, labels, BOTH)
    assert_only_told(caught.value, told)


def test_positions_of_documents_are_not_ignored() -> None:
    batch = {"input_ids": IDS, "labels": IDS, "position_ids": torch.zeros_like(IDS)}
    with pytest.raises(ConfigError) as caught:
        check_batch(batch, "same", ("attention_mask",))
    assert_only_told(caught.value, Told("data: position_ids", "packed documents", write="model=hf"))


def test_packed_documents_that_would_see_each_other_are_refused() -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    one, packed = torch.arange(IDS.shape[1]).expand(IDS.shape), torch.zeros_like(IDS)
    check_batch({**batch, "position_ids": one}, "same", BOTH, documents_meet="it carries a state")
    with pytest.raises(ConfigError, match="restart within a row, but it carries a state"):
        check_batch({**batch, "position_ids": packed}, "same", BOTH, documents_meet="it carries a state")
    check_batch({**batch, "position_ids": packed}, "same", BOTH)
    padding = {"labels": torch.full_like(IDS, -100), "position_ids": packed, "attention_mask": one == 0}
    check_batch({**batch, **padding}, "same", BOTH, documents_meet="it carries a state")


@pytest.mark.parametrize("task", ["fit", "validate"])
def test_the_first_batch_is_looked_at(tmp_path: Path, task: str) -> None:
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, FOLLOWING, strict=True)]
    module = LanguageModel(Bigrams(), {}, {}, 1, labels="same")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters())
    run = trainer(tmp_path, max_epochs=1)
    with pytest.raises(ConfigError, match=r"data\.labels=next"):
        getattr(run, task)(module, DataLoader(rows, batch_size=2))


def hf_llama() -> nn.Module:
    pytest.importorskip("transformers")
    from autolaunch.models.hf import build_hf

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return build_hf({"config": {"model_type": "llama", "num_attention_heads": 2, **sizes}})


def test_packed_documents_of_transformers_are_separate_ones() -> None:
    torch.manual_seed(0)
    module = LanguageModel(hf_llama(), {}, {}, 1)
    assert module.model_inputs == BOTH
    first, second = torch.randint(16, (1, 4)), torch.randint(16, (1, 6))
    packed = {
        "input_ids": torch.cat([first, second], 1), "labels": torch.cat([first, second], 1),
        "position_ids": torch.cat([torch.arange(4), torch.arange(6)])[None],
        "attention_mask": torch.ones(1, 10, dtype=torch.int64),
    }  # fmt: skip
    alone = [module._loss({"input_ids": ids, "labels": ids}) for ids in (first, second)]
    torch.testing.assert_close(module._loss(packed), (alone[0] * 3 + alone[1] * 5) / 8)


def test_padding_of_transformers_is_not_seen() -> None:
    torch.manual_seed(0)
    model = hf_llama()
    module, ids = LanguageModel(model, {}, {}, 1), torch.randint(16, (1, 4))
    padded = {
        "input_ids": F.pad(ids, (0, 2)), "labels": F.pad(ids, (0, 2), value=-100),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    }  # fmt: skip
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    torch.testing.assert_close(module._loss(padded), module._loss({"input_ids": ids, "labels": ids}))
    assert seen == [["attention_mask"], []]
