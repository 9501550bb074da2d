"""Which configuration to run: profiles of models and machines in, the simplest of the fastest out.

`profile`, `memory` and `time` predict, `enumerate` lists what can run and why the rest cannot, `choose` picks, `fit`
and `search` learn from measurements. Hardware is given to it; it never looks for any.
"""
