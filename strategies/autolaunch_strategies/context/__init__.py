"""Sequences sharded along cp: where, and how attention still sees all of them.

`parallel` prepares the modules that a plan marks, `sharded_modules` runs them on parts and tries that at the
first call, `interception` finds the calls of attention within, `attention` answers them.
"""
