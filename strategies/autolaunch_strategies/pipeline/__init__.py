"""Pipeline parallelism for models that know nothing of it: recording, cutting, schedules, running."""
