"""Programs that ask an OpenAI endpoint, trained token for token: the design is told in docs/agents.md."""
