"""In which order the stages of a pipeline work.

One registry of schedules by name, their tables and those of CSV files, what each accepts, the time line that a table
gives, and formulas for what a rank holds. Torch-free, but for order tables that are taken from torch itself. Given to
config checks, `pipeline`, `planner` and reports.
"""
