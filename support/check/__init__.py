"""What only judges, before torch is loaded: rules of configs, the memory plan, and `--check`."""
