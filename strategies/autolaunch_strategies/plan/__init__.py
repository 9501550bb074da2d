"""Plans: rules that say what happens to which module of a model."""
