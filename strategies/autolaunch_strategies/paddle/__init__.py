"""`to_distributed`: a model, an optimizer and a loader as they are, on as many devices as there are.

`automatic_choice` asks the planner, `loader` gives each rank its part of every batch, `config` is what a person may
say.
"""
