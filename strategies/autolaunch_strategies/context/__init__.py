"""Context parallelism: sequences divided among ranks, for models that know nothing of it."""
