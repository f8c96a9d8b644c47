"""What the core stands on, in rooms. README.md says what each is for."""
