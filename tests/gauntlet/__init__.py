"""The gauntlet: models that nobody here wrote, on every axis of the mesh, against a plain loop of one process.

`models/` is the table: a row says how a tiny model is made, what its batches are and what its loss is. `cells` trains a
row on a mesh, `verdict` compares it with one process, `report` writes what came out. `python -m tests.gauntlet` runs
it; no tier of the tests does, since the models come from libraries that only this needs (`requirements.txt`).
"""
