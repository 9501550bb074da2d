"""The one order in which everything is applied to a model, and the account of what was done.

`order` cuts, divides, recomputes, compiles, shards and materialises; `check` says what is wrong with a config before
there is a model. Given to the three front ends and to the command.
"""
