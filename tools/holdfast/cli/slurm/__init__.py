"""`holdfast slurm`: jobs as allocations of a Slurm cluster."""
