"""What a run reads, without torch: config files, data, tokenizer, model folders, the run that it resumes."""
