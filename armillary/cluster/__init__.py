"""Where a job runs: this machine, hosts over ssh, Slurm. Submits, watches and cancels; never imports torch."""
