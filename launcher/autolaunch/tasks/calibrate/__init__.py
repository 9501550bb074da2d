"""`autolaunch calibrate`: the job (`job`), what all ranks measure (`measure`), trainings (`trainings`)."""
