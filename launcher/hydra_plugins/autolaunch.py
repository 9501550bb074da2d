"""Where Hydra 1.3 looks for sweepers; no `__init__.py` may stand beside this file."""

from autolaunch import sweeper


class AutoParallel(sweeper.AutoParallel):
    """See `autolaunch.sweeper`."""
