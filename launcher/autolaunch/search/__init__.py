"""search=auto: the planner's candidates, each run for a few steps through the same launcher as everything else."""
