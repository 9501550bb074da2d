"""The tests, in folders that mirror the rooms of `strategies/` and `launcher/`; `support/` holds what they share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The source tree."""
