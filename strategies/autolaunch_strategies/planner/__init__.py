"""Which configuration to run: profiles of models and machines in, the simplest of the fastest out.

`module_profile` finds out what a model costs: a `first_look`, then a `measured_pass` with two batches, put together by
`assembly`. `profile`, `memory` and `time` predict, `enumerate` lists what can run and why the rest cannot, `choose`
picks, `fit` and `search` learn from measurements. Hardware is given to it; it never looks for any.
"""
