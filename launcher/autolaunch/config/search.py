"""The schema of `conf/search`: how a sweep measures the planner's candidates. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config import option


@dataclass
class Search:
    """search=auto (with -m): short real runs of the planner's candidates; search=optuna: Optuna over swept keys."""

    name: str = option("Which search this is; set by the group.", "auto", choices=("auto", "optuna"))
    trials: int = option("Configurations to measure at most.", 8, ge=1)
    steps: int = option("Optimizer steps that are timed in the first round, after two that are not.", 3, ge=1)
    rounds: int = option("Rounds of successive halving: each runs the better part again with more steps.", 3, ge=1)
    keep: float = option("Share of the configurations that goes on to the next round.", 0.5, gt=0, lt=1)
    noise: float = option("Differences of step time below this share are ties; the simpler one wins.", 0.02, ge=0, lt=1)
    timeout: float | None = option(
        "Seconds after which a trial is ended, with all its processes (null: three times the predicted time, and two "
        "minutes to start).",
        None,
        gt=0,
    )
    objective: str | None = option(
        "search=optuna: the number of metrics.csv (its last) or summary.json by which jobs are compared, such as "
        "val_loss (null: the validation loss, or the training loss where there is no validation; step_time_s where "
        "mesh, plans and other things that change the speed alone are swept).",
        None,
    )
    direction: str = option(
        "search=optuna: whether less of it is better, or more.", "minimize", choices=("minimize", "maximize")
    )
    resume: str | None = option(
        "Output directory of an earlier search whose trials need not run again (null: the one of this search).", None
    )


def is_trial(config: Mapping[str, Any]) -> bool:
    """Whether the job of this config is a trial of search=auto, which the search speaks for."""
    search = config.get("search")
    return search is not None and search["name"] == "auto"
