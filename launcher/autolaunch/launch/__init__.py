"""Start the ranks of a run, watch them, and say what went wrong first. Imports no torch.

`local` starts a process per rank, `place` finds the place of this one inside torchrun or srun, `rendezvous` lets ranks
of several machines meet, `phase` and `failure` are what ranks write down, `containment` ends what a trial leaves.
"""
