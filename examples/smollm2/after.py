"""Two questions after a run, answered with transformers: is the exported model the one that was trained, and what else
has it lost?

    .venv/bin/python examples/smollm2/after.py RUN_FOLDER

Greedy replies to 20 held-out problems are compared with those of the run's last validation, which vLLM gave. Then the
model before and after training is asked 20 questions of other kinds that the one before can answer; it counts both.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BEFORE = Path(__file__).resolve().parent / "model"
NUM_PROBLEMS = 20
QUESTIONS = (  # with a pattern of the answer
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Russia?", "Moscow"),
    ("What is the largest ocean on Earth?", "Pacific"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("Who painted the Mona Lisa?", "Leonardo"),
    ("Who developed the theory of relativity?", "Einstein"),
    ("What is the chemical formula of water?", "H2O"),
    ("What is the chemical symbol for gold?", "Au"),
    ("How many days are in a week?", "7|seven"),
    ("How many legs does a spider have?", "8|eight"),
    ("What is the opposite of hot?", "cold"),
    ("In which city is the Eiffel Tower?", "Paris"),
    ("What language is spoken in Brazil?", "Portuguese"),
    ("What is the currency of Japan?", "yen"),
    ("What is the plural of mouse?", "mice"),
    ("What is the main language spoken in Mexico?", "Spanish"),
)


class Model:
    """A model folder in transformers, in bfloat16."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def replies(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        """Greedy replies to prompts that a chat template wrote."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids = self.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=self.tokenizer.eos_token_id
        )
        replies = ids[:, inputs.input_ids.shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(replies, skip_special_tokens=True)]

    def answers(self) -> list[bool]:
        """Which of QUESTIONS it answers right. Each is asked alone: padding to the longest changes bfloat16's rounding,
        and now and then a reply."""
        right = []
        for question, answer in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            (reply,) = self.replies([prompt], max_new_tokens=32)
            right.append(bool(re.search(rf"\b({answer})\b", reply, re.I)))
        return right


def last_greedy_samples(run: Path) -> list[dict]:
    """What the run's last validation logged of its greedy replies."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    greedy = [sample for sample in samples if sample["kind"] == "validation/greedy"]
    samples = [sample for sample in greedy if sample["step"] == greedy[-1]["step"]]
    assert len(samples) >= NUM_PROBLEMS, f"the run logged {len(samples)}: logger.num_samples_to_log is too small"
    return samples[:NUM_PROBLEMS]


def main(run: Path) -> None:
    torch.set_num_threads(1)  # a question alone is too little work for two, which then wait for each other
    after = Model(run / "hf_model")
    samples = last_greedy_samples(run)
    replies = after.replies([sample["prompt"] for sample in samples], max_new_tokens=12)
    logged = [sample["reply"].removesuffix(after.tokenizer.eos_token).strip() for sample in samples]
    num_same = sum(reply == other for reply, other in zip(replies, logged, strict=True))
    print(f"greedy replies of the exported model in transformers: {num_same} of {len(samples)} as in the run")
    for reply, other, sample in zip(replies, logged, samples, strict=True):
        if reply != other:
            print(f"  {reply!r}, in the run {other!r}: {sample['prompt'].splitlines()[-2]}")
    right_before, right_after = Model(BEFORE).answers(), after.answers()
    print(f"other questions: {sum(right_before)} of {len(QUESTIONS)} right before, {sum(right_after)} after")
    for (question, _), was, now in zip(QUESTIONS, right_before, right_after, strict=True):
        if was and not now:
            print(f"  lost: {question}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    main(parser.parse_args().run)
