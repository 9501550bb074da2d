"""The planner, asked by the command: what a config says of model, recipe and wishes, in; a choice, out.

`choice` asks it, `wanted` is what a person has said already, `known_profiles` keeps profiles, so that no torch is
needed. `profiler` and `ahead` do both in forks of the command, beside what that does itself.
"""
