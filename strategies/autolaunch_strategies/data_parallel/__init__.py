"""What ranks with the same parameters and other data do: sharding levels, and gradients over all of them.

`sharding` applies levels 0 to 3 along dp and cp; `gradients` gives the one norm over every axis, and clips by it.
"""
