"""A Slurm cluster of two hosts on one machine, and a job of ranks on it."""
