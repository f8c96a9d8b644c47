"""Generation on ranks of its own, which asynchronous GRPO can keep busy all the time."""
