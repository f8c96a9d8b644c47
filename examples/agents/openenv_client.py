"""A server of OpenEnv, by its URL, as an agent: each rollout is an episode.

    ./train.sh examples/agents/openenv_client.yaml env.custom.openenv.url=http://127.0.0.1:8000

The agent needs openenv and openai, in an interpreter of their own (env.agents' python).
"""


def rows(cfg):
    """A row for each seed in the subset, such as "0:1000": what the server's reset gets."""
    first, last = map(int, cfg.subset.split(":"))
    return [{"problem": f"episode {seed}", "answer": "", "seed": seed} for seed in range(first, last)]


def solve(base_url, row, url, observation, action):
    """The sum of the episode's rewards. observation, action: their fields with the text and for the reply."""
    from openai import OpenAI
    from openenv import GenericEnvClient

    client, messages = OpenAI(base_url=base_url, api_key="none"), []
    with GenericEnvClient(base_url=url).sync() as env:
        result, reward = env.reset(seed=row["seed"]), 0.0
        while not result.done:
            messages.append({"role": "user", "content": result.observation[observation]})
            reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages.append({"role": "assistant", "content": reply.content})
            result = env.step({action: reply.content})
            reward += result.reward or 0.0
    return reward
