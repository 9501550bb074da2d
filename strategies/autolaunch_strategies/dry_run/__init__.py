"""One training step of chosen ranks of a mesh of any size, pretended in one process.

The code is that of a run: the model is cut, sharded and trained by the same steps. Only tensors have no memory (fake
tensors) and process groups no peers (torch's fake backend). `step.pretend` runs one rank; `trace` watches memory and
collectives; `world` is what a rank hears from others; `agreement` compares what the ranks of a group do.
"""
