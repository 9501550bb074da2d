"""Attention over sequences of which each rank holds a part: four backends over one interface.

`backends.context_attention` is the interface; `gather`, `ring` and `ulysses` (and usp, both at once) are built of
`tiles`, which `kernels` compute, and of the exchanges in `exchange`.
"""
