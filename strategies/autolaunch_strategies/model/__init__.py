"""The model as one device would have it: its blocks, how it is built, and how its weights are drawn.

Nothing here is sharded. `construction` records a constructor on the meta device, `materialise` runs it again for
what a rank holds, `random_streams` keeps random numbers independent of the mesh, `example_inputs` guesses a batch.
"""
