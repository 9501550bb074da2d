"""One forward pass of a model on shapes alone, shown to whoever wants to learn something from it.

`shapes` makes a model's state and inputs fake, `recorder` runs it and shows observers each module and operator,
`unreadable` steps over parts that need values, `values` answers where a step asks for some, `inputs` finds inputs with
which it runs, `step` runs the method of a module around it that calls it. Observers live in the rooms that need what
they learn: `plan` (which layer feeds which), `pipeline` (who needs what), `planner` (costs).
"""
