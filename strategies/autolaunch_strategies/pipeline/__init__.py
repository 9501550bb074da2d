"""Models cut into stages that run their own unmodified forward.

`cut` and `split` say where, `record` what passes, `stage` and `run` execute a schedule, `transfer` moves tensors
between ranks, `batch` drives a batch for the loops of the front ends. Given to `apply` and the front ends.
"""
