"""Rules that say which layers are sharded along mp and cp, and how; and where such rules come from.

`rules` reads and matches them, `patterns` are their keys, `derive` finds them by dataflow, `transformers_plans` takes
those that transformers ships, `choose` decides among them.
"""
