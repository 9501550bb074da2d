"""What loggers are given: the config of the run without what came from the environment, and checkpoint directories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from omegaconf import OmegaConf

from autolaunch.cli import run
from autolaunch.config.compose import from_environment
from autolaunch.report.logged_config import log_config
from autolaunch_strategies.checkpoint.files import write_manifest
from tests.support.messages import Told, assert_only_told


def test_loggers_get_the_config_without_what_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    composed: Any = OmegaConf.create(
        {
            "optimizer": {"lr": 0.5, "betas": [0.9, "${optimizer.lr}"]},
            "model": {"mp_plans": {"layers.*.(q|k)_proj": "ColWiseParallel"}, "tokenizer": "bytes"},
            "logger": {
                "x": {"user": "${oc.env:MY_SECRET}", "api_key": "typed", "group": "of ${logger.x.user}"},
                "y": {"tags": ["one", "${oc.env:MY_SECRET}"], "name": "${.z}", "z": "${oc.env:MY_SECRET,none}"},
            },
        }
    )
    left_out = from_environment(composed)
    config: Any = OmegaConf.to_container(composed, resolve=True)
    assert "hush" in str(config)
    loggers = [CSVLogger(tmp_path, name="csv", version=""), TensorBoardLogger(str(tmp_path), name="board", version="")]
    log_config([*loggers, object()], config, left_out)
    for logger in loggers:
        logger.save()
    written = [yaml.safe_load((tmp_path / name / "hparams.yaml").read_text()) for name in ("csv", "board")]
    assert written[0] == written[1] == {
        "optimizer": {"lr": 0.5, "betas": [0.9, 0.5]},
        "model": {"mp_plans": '{"layers.*.(q|k)_proj": "ColWiseParallel"}', "tokenizer": "bytes"},
        "logger": {"x": {}, "y": {}},
    }  # fmt: skip


def test_checkpoint_directories_are_artifacts_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from autolaunch.report.wandb_logger import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    paths = [tmp_path / "checkpoints" / f"step_{step}.ckpt" for step in (1, 2)]
    for step, path in enumerate(paths, start=1):
        path.mkdir(parents=True)
        (path / f"weights_of_{step}.distcp").write_bytes(b"x" * 100)
        write_manifest(path, step, "2")
    scores = {str(path): torch.tensor(0.5) for path in [*paths, tmp_path / "being_written.ckpt"]}
    callback: Any = SimpleNamespace(
        best_k_models=scores, best_model_path=str(paths[0]), last_model_path=str(paths[1]), monitor="val_loss"
    )
    logger = WandbLogger(save_dir=str(tmp_path), log_model="all")
    logger.after_save_checkpoint(callback)
    logger.after_save_checkpoint(callback)
    logger.finalize("success")
    logger.experiment.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for name in (b"weights_of_1.distcp", b"weights_of_2.distcp"):
        assert content.count(name) == 1  # not once per call
    assert b"being_written" not in content and b"best" in content


def test_a_logger_that_would_leave_out_our_checkpoints_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = "logger={w: {_target_: lightning.pytorch.loggers.MLFlowLogger, log_model: true}}"
    assert run([f"output_dir={tmp_path / 'run'}", logger.replace("logger=", "++logger=")]) == 2
    told = [
        Told("logger.w.log_model=true", "directories", write="logger.w.log_model=false"),
        Told(
            "logger.w._target_=lightning.pytorch.loggers.MLFlowLogger",
            "mlflow",
            write="pip install 'autolaunch[mlflow]'",
        ),
    ]
    assert_only_told(capsys.readouterr().err, told)
