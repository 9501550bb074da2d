"""Checkpoints that any mesh can read: sharded files under a manifest, complete or not there at all.

`sharded` saves and loads, `files` knows which directories are complete, `optimizers` names the state of optimizers by
parameter.
"""
