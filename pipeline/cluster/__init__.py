"""What wcpipe knows about SLURM without talking to it: settings, scripts, states, sizes. `stages/cluster.py` talks."""
