"""Hydra's sweeper of search=auto; `hydra_plugins.autolaunch` has the subclass that Hydra 1.3 finds.

Imported at every start of the command, so that it imports nothing heavy.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from autolaunch_strategies.config import ConfigError, ConfigErrors

NAME = "autoparallel"


class AutoParallel(Sweeper):
    """Runs the planner's candidates for a few steps each, and writes down the best."""

    launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Search; `arguments` are the overrides that were typed. Ends the command with 1 if nothing was measured."""
        from autolaunch.search.run import run_search

        assert self.config is not None and self.hydra_context is not None
        try:
            best = run_search(self.config, self.hydra_context.config_loader, self.launcher, arguments)
        except (ConfigError, ConfigErrors) as error:
            # Through Hydra it would be a traceback.
            print(error, file=sys.stderr)
            sys.exit(2)
        if best is None:
            sys.exit(1)
        return best


ConfigStore.instance().store(
    group="hydra/sweeper",
    name=NAME,
    node={"_target_": "hydra_plugins.autolaunch.AutoParallel"},
    provider="autolaunch",
)
