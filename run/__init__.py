"""What operates a run: config files and checks, set-up, checkpoints, logs."""
