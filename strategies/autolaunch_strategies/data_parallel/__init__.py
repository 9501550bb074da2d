"""What ranks with the same parameters and other data do: sharding levels, and gradients over all of them.

`groups` says which ranks those are for a parameter; `sharding` applies levels 0 to 3; `gradients` averages what is not
sharded, gives the one norm over every axis, and clips by it.
"""
