"""The machine at hand: which devices are visible, and what was measured or is guessed of them. Torch-free."""
