"""What a kind of torch functions computes on parts of a sequence: a file per kind.

A rule computes the function on what this rank holds and says where the sequence is in what comes out; or it raises
`NeedsWhole`: then the function runs on whole tensors. What a rule decides by is the same on every rank (shapes of the
whole, positions), since all ranks gather together or not at all.
"""
