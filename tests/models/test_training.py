"""The LightningModules, the losses, the optimizer and the schedules; `model=custom` and `module=`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autolaunch.config.schema import Job, Optimizer, Scheduler
from autolaunch.models import build_model, build_module
from autolaunch.models.facts import ModelFacts, model_facts
from autolaunch.models.language_model import LanguageModel, SupervisedModule, build_loss
from autolaunch.models.optimizer import build_optimizer, learning_rate_factor
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told, assert_told


def job(**keys: Any) -> dict[str, Any]:
    base = dataclasses.asdict(Job())
    base["scheduler"]["name"] = "constant"
    base["trainer"]["max_steps"] = -1  # as `check_config` makes it of null
    return {**base, **keys}


def trainer(path: Path, **keys: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=1, default_root_dir=path, **quiet, **keys)


# --- modules -----------------------------------------------------------------------------------------------------


def test_language_model_trains_validates_and_predicts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"name": "llama", "num_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    module = build_module(job(model=small, optimizer={**vars(Optimizer(lr=1e-2))}))
    assert isinstance(module, LanguageModel)
    ids = (torch.arange(17) * 5 % 32)[None].repeat(8, 1)
    batches = DataLoader([{"input_ids": ids[0, :-1], "labels": ids[0, 1:]}] * 160, batch_size=8)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, batches, batches)
    assert fit.callback_metrics["val_loss"] < 1.0 < 3.0 < F.cross_entropy(torch.zeros(1, 320), torch.tensor([0]))
    assert fit.callback_metrics["loss"].ndim == 0
    assert fit.test(module, batches, verbose=False)[0]["test_loss"] == pytest.approx(
        fit.callback_metrics["test_loss"].item()
    )
    predictions = fit.predict(module, batches)
    assert predictions[0].shape == (8, 16) and predictions[0].dtype == torch.int64


def test_labels_of_minus_100_do_not_count() -> None:
    class Fixed(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return F.one_hot(input_ids, 5).to(torch.bfloat16)

    module = LanguageModel(Fixed(), {}, {}, 1, labels="next")
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 2, 4]])}
    logits = F.one_hot(torch.tensor([2, 3]), 5).float()
    assert module._loss(batch).dtype == torch.float32
    torch.testing.assert_close(module._loss(batch), F.cross_entropy(logits, torch.tensor([2, 4])))


def test_language_model_of_transformers_gives_the_same_loss_as_transformers() -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    module = build_module(
        job(model={"name": "hf", "config": {**config, "num_attention_heads": 2, "num_key_value_heads": 1}})
    )
    ids = torch.randint(0, 64, (2, 9))
    assert isinstance(module, LanguageModel)
    ours = module._loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    torch.testing.assert_close(ours, module.model(ids, labels=ids).loss)


class TwoInputs(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.linear(a + b)
        return out if labels is None else {"loss": F.cross_entropy(out, labels)}


A, B, LABELS = torch.ones(6, 3), torch.arange(18.0).view(6, 3), torch.arange(6) % 4


@pytest.mark.parametrize(
    ("loss", "batch", "expected"),
    [
        pytest.param("cross_entropy", (A, B, LABELS), lambda out: F.cross_entropy(out, LABELS), id="tuple"),
        pytest.param(
            "cross_entropy", {"a": A, "b": B, "y": LABELS}, lambda out: F.cross_entropy(out, LABELS), id="dict-y"
        ),
        pytest.param(
            "output", {"a": A, "b": B, "labels": LABELS}, lambda out: F.cross_entropy(out, LABELS), id="output"
        ),
        pytest.param("output", (A, B, LABELS), lambda out: F.cross_entropy(out, LABELS), id="output-tuple"),
        pytest.param(
            "mse",
            {"a": A, "b": B, "target": B[:, :1].repeat(1, 4)},
            lambda out: ((out - B[:, :1]) ** 2).mean(),
            id="mse",
        ),
        pytest.param(
            {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1},
            (A, B, LABELS),
            lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.1),
            id="class",
        ),
        pytest.param(
            {"_target_": "torch.nn.functional.cross_entropy", "_partial_": True, "label_smoothing": 0.1},
            (A, B, LABELS),
            lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.1),
            id="function",
        ),
    ],
)
def test_losses_and_batches(loss: Any, batch: Any, expected: Any) -> None:
    torch.manual_seed(0)
    model = TwoInputs()
    module = SupervisedModule(model, loss, {}, {}, 1)
    torch.testing.assert_close(module._step(batch), expected(model.linear(A + B)))


def test_cross_entropy_of_sequences_flattens() -> None:
    scores, target = torch.randn(2, 3, 5), torch.tensor([[0, 1, -100], [4, 2, 2]])
    torch.testing.assert_close(
        build_loss("cross_entropy")(scores, target), F.cross_entropy(scores.view(6, 5), target.view(6))
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"ignore_index": 2, "label_smoothing": 0.1}, id="smoothed"),
        pytest.param({"weight": [1.0, 0.5, 3.0, 2.0], "label_smoothing": 0.1}, id="weights"),
        pytest.param({"_target_": "torch.nn.NLLLoss", "weight": [1.0, 0.5, 3.0, 2.0]}, id="nll"),
        pytest.param({"_target_": "torch.nn.functional.cross_entropy", "_partial_": True}, id="function"),
    ],
)
def test_losses_of_torch_over_classes_say_over_what_they_are_means(options: dict[str, Any]) -> None:
    """So that parts of a batch are weighed as the whole one is, and one without any target is no `nan`."""
    options = {"_target_": "torch.nn.CrossEntropyLoss", **options}
    if "weight" in options:
        options["weight"] = {"_target_": "torch.tensor", "data": options["weight"]}
    module = SupervisedModule(TwoInputs(), options, {}, {}, 1)
    target = torch.tensor([0, 1, -100 if "ignore_index" not in options else 2, 3, 3, 1])
    scores = module.model(A, B)
    expected = build_loss(options)(scores, target)  # type: ignore[misc]  # a loss is built of it
    torch.testing.assert_close(module._step((A, B, target)), expected)
    assert module.num_items_in_batch is not None
    parts = [(A[:4], B[:4], target[:4]), (A[4:], B[4:], target[4:])]
    counts = torch.stack([module.num_items_in_batch(part) for part in parts])
    losses = torch.stack([module._step(part) for part in parts])
    torch.testing.assert_close((losses * counts).sum() / counts.sum(), expected)
    without = module._step((A[2:3], B[2:3], target[2:3]))
    without.backward()
    assert without == 0 and not module.model.linear.weight.grad.any()


def test_custom_model_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = {"name": "custom", "_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1, "loss": "mse"}
    module = build_module(job(model=model, optimizer=vars(Optimizer(lr=0.1, weight_decay=0.0))))
    assert isinstance(module, SupervisedModule) and isinstance(module.model, nn.Linear)
    x = torch.randn(64, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    fit = trainer(tmp_path, max_epochs=40)
    fit.fit(module, loader, loader)
    assert fit.callback_metrics["val_loss"] < 1e-2
    assert fit.predict(module, DataLoader(TensorDataset(x), batch_size=64))[0].shape == (64, 1)


class UsersModule(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def test_module_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_project", sys.modules[__name__])
    module = build_module(job(module={"_target_": "users_project.UsersModule", "width": 7}, model=None))
    assert isinstance(module, UsersModule) and module.width == 7


# --- optimizer and schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "kind", "values"),
    [
        pytest.param(vars(Optimizer()), torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}, id="adamw"),
        pytest.param(vars(Optimizer("adam", lr=1.0, eps=0.5)), torch.optim.Adam, {"lr": 1.0, "eps": 0.5}, id="adam"),
        pytest.param(vars(Optimizer("sgd", momentum=0.9)), torch.optim.SGD, {"momentum": 0.9}, id="sgd"),
        pytest.param(
            {**vars(Optimizer("custom", "torch.optim.Adagrad", lr=0.5)), "lr_decay": 0.25},
            torch.optim.Adagrad,
            {"lr": 0.5, "lr_decay": 0.25},
            id="custom",
        ),
    ],
)
def test_optimizers_decay_matrices_only(cfg: dict, kind: type, values: dict) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), cfg)
    assert type(optimizer) is kind
    decayed, rest = optimizer.param_groups
    assert {key: decayed[key] for key in values} == values
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)]
    assert [id(p) for p in rest["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]


GROUPED = {"match": ["3", "0.bias"], "lr": 0.5}


def test_parameters_have_the_options_of_the_first_group_that_names_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(4, 2))
    model[3].weight = model[2].weight  # tied: under either name
    model[4].requires_grad_(False)
    second = {"match": [".*weight", ".*bias"], "weight_decay": 0.2, "betas": [0.5, 0.6]}

    def groups(*groups: dict, kind: str | None = None) -> list[dict]:
        cfg = {**vars(Optimizer("custom" if kind else "adamw", kind, lr=1e-3)), "groups": groups}
        return build_optimizer(model.named_parameters(remove_duplicate=False), cfg).param_groups

    options = [
        ([id(item) for item in group["params"]], group["lr"], group["weight_decay"], group["betas"])
        for group in groups(GROUPED, second)
    ]
    assert options == [
        ([], 1e-3, 0.1, (0.9, 0.95)),
        ([], 1e-3, 0.0, (0.9, 0.95)),
        ([id(model[2].weight)], 0.5, 0.1, (0.9, 0.95)),
        ([id(model[0].bias), id(model[3].bias)], 0.5, 0.0, (0.9, 0.95)),
        ([id(model[0].weight)], 1e-3, 0.2, (0.5, 0.6)),
        ([id(model[1].weight), id(model[1].bias)], 1e-3, 0.2, (0.5, 0.6)),
    ]
    assert groups({"match": ["0"], "lr_decay": 0.5}, kind="torch.optim.Adagrad")[2]["lr_decay"] == 0.5
    for wrong, told in (
        ([{"match": ["0.wieght"]}], Told("optimizer.groups[0].match: 0.wieght", ".weight", write=None)),
        ([GROUPED, {"match": "0.bias"}], Told("optimizer.groups[1].match: 0.bias", "nothing is trained")),
        ([{"match": ["4"]}], Told("optimizer.groups[0].match: 4", "nothing is trained")),
    ):
        with pytest.raises(ConfigError) as caught:
            groups(*wrong)
        assert_only_told(str(caught.value), told)
    with pytest.raises(ConfigError, match="lr_decay"):
        groups({"match": ["0"], "lr_deacy": 0.5}, kind="torch.optim.Adagrad")


@pytest.mark.parametrize(
    ("scheduler", "total", "expected"),
    [
        pytest.param(Scheduler("constant"), -1, [1, 1, 1], id="constant"),
        pytest.param(Scheduler("constant", warmup_steps=3), -1, [0.25, 0.5, 0.75, 1, 1], id="warm-up"),
        pytest.param(Scheduler("linear"), 4, [1, 0.75, 0.5, 0.25, 0, 0], id="linear"),
        pytest.param(Scheduler("linear", 1, 0.2, 5), 100, [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2], id="linear-own-end"),
        pytest.param(Scheduler("cosine"), 4, [1, 0.853553, 0.5, 0.146447, 0, 0], id="cosine"),
        pytest.param(Scheduler("cosine", 2, 0.5), 4, [1 / 3, 2 / 3, 1, 0.75, 0.5], id="cosine-minimum"),
    ],
)
def test_schedules(scheduler: Scheduler, total: int, expected: list[float]) -> None:
    factor = learning_rate_factor(vars(scheduler), total)
    assert [factor(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)


def test_the_rate_changes_with_every_optimizer_step(tmp_path: Path) -> None:
    rates = []

    class Seen(SupervisedModule):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    module = Seen(nn.Linear(2, 1), "mse", vars(Optimizer("sgd", lr=1.0)), vars(Scheduler("linear")), 4)
    data = DataLoader(TensorDataset(torch.ones(16, 2), torch.ones(16, 1)), batch_size=2)
    trainer(tmp_path, max_steps=4, accumulate_grad_batches=2).fit(module, data)
    assert rates == [1.0, 0.75, 0.5, 0.25]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "told"),
    [
        pytest.param(
            lambda: build_loss("mae"),
            Told(
                "model.loss=mae",
                "no such loss",
                allowed=("cross_entropy, mse, output", "_target_"),
                write="model.loss=cross_entropy",
            ),
            id="loss",
        ),
        pytest.param(
            lambda: build_loss({"_target_": "torch.nn.MSELoss", "reduction": "sum"}),
            Told("model.loss.reduction=sum", "mean over a batch", allowed=("mean",), write="model.loss.reduction=mean"),
            id="loss-of-a-sum",
        ),
        pytest.param(
            lambda: build_loss({"_target_": "torch.nn.L2Loss"}),
            Told("model.loss._target_=torch.nn.L2Loss", "torch.nn.L1Loss"),
            id="loss-target",
        ),
        pytest.param(
            lambda: build_model({"name": "custom", "_target_": "fractions.Fraction"}),
            Told("model._target_=fractions.Fraction", "Fraction", allowed=("torch.nn.Module",)),
            id="not-a-module",
        ),
        pytest.param(
            lambda: build_model({"name": "bert"}),
            Told(
                "model.name=bert",
                "no such model",
                allowed=("llama, hf", "_target_"),
                write="model=custom model._target_=...",
            ),
            id="model-name",
        ),
        pytest.param(
            lambda: build_module(job(module={"width": 3})),
            Told(
                "module", "LightningModule", allowed=("LightningModule",), write="module._target_=my_project.MyModule"
            ),
            id="module-without-target",
        ),
        pytest.param(
            lambda: build_module(job(module={"_target_": "torch.nn.Identity"})),
            Told("module._target_=torch.nn.Identity", "Identity", allowed=("LightningModule",)),
            id="module-not-lightning",
        ),
        pytest.param(
            lambda: build_optimizer([], {"name": "lion", "lr": 1.0}),
            Told("optimizer.name=lion", "no such optimizer", allowed=("adamw, adam, sgd, custom",)),
            id="optimizer",
        ),
        pytest.param(
            lambda: build_optimizer([], vars(Optimizer("custom"))),
            Told(
                "optimizer=custom",
                "which optimizer",
                allowed=("torch.optim.Optimizer",),
                write="optimizer._target_=torch.optim.Adagrad",
            ),
            id="optimizer-without-target",
        ),
        pytest.param(
            lambda: build_optimizer([], vars(Optimizer("custom", "torch.optim.AdamWW"))),
            Told("optimizer._target_=torch.optim.AdamWW", "torch.optim.AdamW"),
            id="optimizer-target",
        ),
        pytest.param(
            lambda: learning_rate_factor({"name": "step"}, 10),
            Told("scheduler.name=step", "no such schedule", allowed="constant, cosine, linear"),
            id="schedule",
        ),
        pytest.param(
            lambda: learning_rate_factor(vars(Scheduler("cosine")), -1),
            Told(
                "scheduler=cosine with trainer.max_steps=-1",
                "last step",
                allowed=("scheduler=constant",),
                write="scheduler.total_steps=10000",
            ),
            id="schedule-without-end",
        ),
        pytest.param(
            lambda: learning_rate_factor(vars(Scheduler("linear", warmup_steps=50)), 50),
            Told("scheduler.warmup_steps=50", "step 50", allowed="0 to 49", write="scheduler.warmup_steps=5"),
            id="warm-up-too-long",
        ),
        pytest.param(
            lambda: SupervisedModule(nn.Identity(), "mse", {}, {}, 1)._step({"x": A}),
            Told("data", "keys x", "no target", allowed=("labels, label, targets, target, y",)),
            id="batch-without-target",
        ),
        pytest.param(
            lambda: SupervisedModule(nn.Identity(), "mse", {}, {}, 1)._step([A]),
            Told("data", "one tensor", "no target", allowed=("(input, target)", "dict")),
            id="batch-of-one-tensor",
        ),
    ],
)
def test_what_is_refused(call: Any, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert_only_told(caught.value, told)


def test_mse_does_not_broadcast() -> None:
    with pytest.raises(ValueError) as caught:
        build_loss("mse")(torch.zeros(6, 1), torch.zeros(6))
    assert_told(caught.value, "model.loss=mse", "[6, 1]", "[6]")


# --- configs -----------------------------------------------------------------------------------------------------


def test_facts_of_a_model_of_ones_own_are_unknown() -> None:
    assert model_facts({"name": "mine", "_target_": "my.Net", "num_layers": 3}) == ModelFacts("mine")


def test_facts_import_no_torch() -> None:
    code = (
        "import sys; from autolaunch.models.facts import model_facts; model_facts({'name': 'llama'}); "
        "model_facts({'name': 'hf', 'config': {'model_type': 'llama'}}); "
        "print([name for name in ('torch', 'transformers', 'lightning', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]"


def test_a_schedule_ends_with_the_last_epoch(tmp_path: Path) -> None:
    """As if the steps of the epochs, which are known from the data, had been counted and typed."""
    rates = []
    for steps, epochs in ((6, None), (-1, 2)):
        module = SupervisedModule(nn.Linear(4, 2), "mse", {"lr": 0.1}, {"name": "cosine"}, steps)
        data = DataLoader(TensorDataset(torch.rand(12, 4), torch.rand(12, 2)), batch_size=4)
        fit = trainer(tmp_path, max_steps=steps, max_epochs=epochs)
        fit.fit(module, data)
        assert fit.global_step == 6
        schedule: Any = fit.lr_scheduler_configs[0].scheduler
        rates.append([schedule.lr_lambdas[0](step) for step in range(7)])
    assert rates[0] == rates[1]
    assert rates[0][0] == 1 and rates[0][6] == pytest.approx(0)
