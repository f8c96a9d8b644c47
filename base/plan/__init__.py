"""What chooses: the memory and the time that a run needs, and the packs and FSDP settings that fit. No torch."""
