"""Every private or version-dependent name of torch that the engine uses, a file per subject, and nothing else.

A new version of torch is met here. Nothing in this room knows what the engine is for, and no other room writes a name
of torch that begins with an underscore.

Whoever comes in also has what `gloo` repairs: groups that are made by anybody later on are made that way.
"""

from autolaunch_strategies.torch_private.gloo import complete_in_one_thread

complete_in_one_thread()
