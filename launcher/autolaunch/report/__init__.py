"""What a person sees of a run, and what is written about it."""
