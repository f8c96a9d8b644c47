"""What only judges, before torch is loaded: rules of configs, and `--check`."""
