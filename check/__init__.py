"""What answers before torch is loaded: config files, rules, inputs, resume and the memory plan."""
