"""The tensor type that holds a rank's part of a sequence, and what torch functions do with it.

Code between the modules in which sequences are sharded sees the shapes of whole sequences. `shard` is the type, given
to `context`, `tensor` and `pipeline`. `functions` runs a torch function on it, and is loaded with the type: `table`
names of each function the rule, `rules` compute them on parts, by what `parts` knows of where the sequence is.
"""

from autolaunch_strategies.sharded_sequence import functions as functions
