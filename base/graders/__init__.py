"""Environments that use the judges, and the processes that grade for them."""
