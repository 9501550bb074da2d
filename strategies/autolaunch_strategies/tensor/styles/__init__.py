"""Styles: what happens to a module when a plan names it."""
