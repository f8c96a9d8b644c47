"""What operates a run. It stands on the core; the entries alone import it."""
