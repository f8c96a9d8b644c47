"""An agent as a command: the row on stdin, the reward as the last line; it asks where OPENAI_BASE_URL says."""

import json
import os
import sys
import urllib.request

row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["input"]}]
print("noise")
for _ in range(2):
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as answer:
        reply = json.load(answer)["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
print(json.dumps({"reward": 0.25}))
