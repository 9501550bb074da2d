"""Weights & Biases, with our checkpoints, which are directories, as artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger as Lightnings
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from autolaunch_strategies.checkpoint.files import read_manifest
from autolaunch_strategies.config import ConfigError


class WandbLogger(Lightnings):
    """Lightning's logger, which takes checkpoints for single files and leaves out all others.

    What an artifact is downloaded to is a checkpoint: `ckpt_path=` takes it.

    Args:
        log_model: True: the newest checkpoint, and the best if a value is monitored, when training has ended;
            `all`: each when it has been written.
        arguments: those of Lightning's, by their names.

    Raises:
        ConfigError: another `log_model`.
    """

    def __init__(self, *, log_model: bool | str = False, **arguments: Any) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigError(f"logger.wandb.log_model={log_model}", "no such choice", "true, false, all")
        super().__init__(log_model=False, **arguments)
        self._checkpoints_as_artifacts = log_model
        self._callback: ModelCheckpoint | None = None
        self._written: set[str] = set()

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Take up what has been written."""
        self._callback = checkpoint_callback
        if self._checkpoints_as_artifacts == "all":
            self._write(list(checkpoint_callback.best_k_models))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Take up what is left at the end, such as a checkpoint that was still being written in the background."""
        super().finalize(status)
        if self._callback is None or status != "success" or not self._checkpoints_as_artifacts:
            return
        self._write([self._callback.best_model_path, self._callback.last_model_path])

    def _write(self, paths: list[str]) -> None:
        import wandb

        assert self._callback is not None
        for path in dict.fromkeys(paths):
            manifest = read_manifest(Path(path))
            if path in self._written or not manifest:
                continue
            score = self._callback.best_k_models.get(path)
            metadata = {"step": manifest["step"], "original_filename": Path(path).name}
            if self._callback.monitor is not None and score is not None:
                metadata |= {"monitor": self._callback.monitor, "score": float(score)}
            artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model", metadata=metadata)
            artifact.add_dir(path)
            best = self._callback.monitor is not None and path == self._callback.best_model_path
            self.experiment.log_artifact(artifact, aliases=["latest", "best"] if best else ["latest"])
            self._written.add(path)
