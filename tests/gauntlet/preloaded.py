"""Imported by the process that forks ranks: with this all of them have the libraries."""

from tests.gauntlet.libraries import preload

preload()
