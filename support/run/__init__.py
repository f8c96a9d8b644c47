"""What operates a run: set-up, checkpoints, logs, health, validation."""
