"""The tensor type that holds a rank's part of a sequence, and what torch functions do with it.

Code between the modules in which sequences are sharded sees the shapes of whole sequences. `shard` is the type, given
to `context`, `tensor` and `pipeline`; `functions` says of each torch function what it computes on parts, and is loaded
with the type.
"""

from autolaunch_strategies.sharded_sequence import functions as functions
