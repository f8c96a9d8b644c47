"""The processes of a run: ranks, exits and signals, the watchdog."""
