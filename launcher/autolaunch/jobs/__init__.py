"""From a command line to jobs that run: composed, checked and resolved once, started, and how each ended.

`run` is what the command calls; `start` runs one job; `ends` keeps how each ended, and prints the table of a sweep.
"""
