"""Layers sharded along mp: the styles, and what the model's own code sees between them.

`model_parallel` applies the rules of a plan, `styles` are what a rule can ask for, `views` keeps global shapes between
sharded layers, `sharding_errors` says in the plan's words what torch says in its own.
"""
