"""Which layer is divided in which way along mp and cp: rules, and where they come from.

`rules` reads and matches them, `patterns` are their keys, `derive` finds them by dataflow, `transformers_plans` takes
those that transformers ships, `choose` decides among them.
"""
