"""Rows on disk or on the hub -> problems in the order in which they are trained on."""
