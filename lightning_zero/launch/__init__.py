"""Start of the ranks of a job, by Hydra, SLURM or this process."""
