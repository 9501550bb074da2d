"""Lets `python -m autolaunch` be the command: this is what torchrun and srun start."""

from autolaunch.cli import main

if __name__ == "__main__":
    main()
