"""Where Hydra 1.3 looks for sweepers; no `__init__.py` may stand beside this file."""

from autolaunch.search import hydra_sweeper as sweeper


class AutoParallel(sweeper.AutoParallel):
    """See `autolaunch.search.hydra_sweeper`."""
