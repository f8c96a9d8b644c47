"""Rooms around the algorithm; each is opened by whoever has its problem. README.md says what each is for."""
