"""The one order in which everything is applied to a model, and the account of what was done.

`steps` cut stages, apply styles, recompute, compile, shard and materialise, each planned before any is applied, `order`
runs them, `registry` keeps what was applied to which module; `check` says what is wrong with a config before there is
a model.
"""
