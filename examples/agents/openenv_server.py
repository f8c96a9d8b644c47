"""A server of OpenEnv: sums of two digits, with a second try. It stands for a server of yours, or of a hub.

.venv/bin/python -m venv ../openenv && ../openenv/bin/pip install openenv openai
../openenv/bin/python examples/agents/openenv_server.py 8000
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Answer(Action):
    answer: Any  # verifiers sends 85 as a number


class Question(Observation):
    text: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        drawn = random.Random(seed)
        a, b = drawn.randrange(10, 100), drawn.randrange(10, 100)
        self.question, self.total, self._state = f"{a}+{b}=", str(a + b), State(episode_id=episode_id)
        return Question(text=self.question)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        is_right, is_last = str(action.answer).strip() == self.total, self._state.step_count == 2
        return Question(text=self.question, done=is_right or is_last, reward=is_right / self._state.step_count)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=100)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
