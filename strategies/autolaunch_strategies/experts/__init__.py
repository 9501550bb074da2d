"""Experts of a mixture, shared out over ranks: which modules they are, and how tokens come to them and back.

They are found by structure, whatever `transformers` calls them, and their code stays as it is. Given to `apply`, which
puts them into the order of steps; the sums over all tokens of a batch that a router's loss needs are made here, too.
"""
