"""Where a rank is: its coordinates, its groups, its peers along an axis.

`rank_mesh` makes the DeviceMesh of a config, `process_group` the world that it needs, `layout` says which positions of
a sequence each rank of cp holds. Given to every room above that talks to other ranks.
"""
