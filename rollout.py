"""The vLLM engine inside the trainer's process: generate, sleep and wake, weight sync; and the rollout over it.

Owns: everything that touches vllm (the only file that imports it), per-sample seeds, turning prompts into graded
`Sample`s. Does not own: what the samples are worth (envs.py) or how they are trained on (grpo.py, loss.py).

One engine per rank, or one per group of `tensor_parallel_size` consecutive ranks ("external_launcher": every rank of
a group calls `generate` with the same prompts and gets the same samples). The engine never reads weights from disk: it
starts with dummy ones and gets the trainer's by `sync`, which is therefore the only path weights can take.
"""

import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

import envs
from config import GenerationConfig
from data import Problem, Sample
from hf.tokenizer import Tokenizer
from system.exits import Interrupted, StopRun
from system.ranks import Ranks

# vLLM reads these while it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in this process
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # several ranks share the cores; vLLM would pin all of them to the same ones
)
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if not torch.cuda.is_available():
    # vLLM's sampler is under torch.compile, which on CPU needs a C++ compiler and 6-24 s, and makes nothing faster.
    import torch._dynamo

    torch._dynamo.config.disable = True

logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # for what it says before it reads that itself
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # of its own use of a deprecated torch name

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

STEPS_BETWEEN_STOPS = 16  # decode steps; with several ranks to an engine each look is a collective of theirs


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one prompt: ids (end token included), their logps under the sampling distribution
    (after temperature), and why it ended: "stop" (an end token) or "length"."""

    ids: np.ndarray
    logps: np.ndarray
    finish_reason: str


class Engine:
    """An in-process vLLM, awake or (CUDA only) asleep, holding the weights of `weight_version`. stop: whether to give
    up what is being generated; all ranks of an engine must be answered alike (Ranks.any_rank_of_engine)."""

    stop: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        folder: str,
        tokenizer: Tokenizer,
        cfg: GenerationConfig,
        *,
        dtype: str,
        tied_head: bool,
        max_total_tokens: int,
        seed: int,
    ):
        self.cuda = torch.cuda.is_available()
        self.vocab_size = tokenizer.vocab_size
        self.stop_token_ids = cfg.stop_token_ids or tokenizer.eos_token_ids
        self.max_total_tokens = max_total_tokens
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.weight_version = -1
        # Ids beyond the tokenizer (padded vocabulary) do not exist in the engine: its vocabulary is the tokenizer's.
        overrides: dict = {"vocab_size": self.vocab_size}
        self.send_head_copy = tied_head and not self.cuda
        if not self.cuda:
            # vLLM's CPU layers compute from packed copies, and a reload does not refresh the one of a *tied* head: the
            # logits would stay stale. Untied, the head is a layer like the others; `sync` sends it the embedding.
            overrides["tie_word_embeddings"] = False
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.vllm_cfg.kvcache_gib)
        # A prompt cut into chunks makes vLLM rewind the request's generator, which CPU generators cannot do.
        whole_prompts = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, max_total_tokens))
        hardware = dict(enable_sleep_mode=True) if self.cuda else dict(enforce_eager=True, **whole_prompts)
        self.llm = LLM(
            model=folder,
            skip_tokenizer_init=True,  # token-in, token-out
            load_format="dummy",
            generation_config="vllm",  # or it would add the folder's end tokens and sampling defaults to ours
            hf_overrides=overrides,
            dtype=dtype,
            max_model_len=max_total_tokens,
            tensor_parallel_size=cfg.vllm_cfg.tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=cfg.vllm_cfg.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",  # after temperature: the distribution that was sampled from
            seed=seed,  # ranks of a tensor-parallel group must agree (vllm#15895)
            disable_log_stats=True,
            **({"enforce_eager": cfg.vllm_cfg.enforce_eager} | hardware),
        )
        self.param_names = self.llm.apply_model(_checkpoint_names)[0]
        self.shapes: dict[str, list[int]] = {}  # of the first sync, which vLLM itself compares with its own

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        top_p: float = 1.0,
        top_k: int | None = None,
        interruptible: bool = True,
    ) -> list[Completion]:
        """Samples one completion per prompt. On CPU it depends on (weights, prompt, seed, options) only, not on what
        else is in the batch; CUDA kernels round differently in other batches. `temperature` 0 is greedy; top_p, top_k
        are for validation alone. Every rank of a tensor-parallel group must call it alike. Interrupted when told to
        stop meanwhile, if `interruptible`.
        """
        assert self.weight_version >= 0, "generate() before the first sync(): the engine holds dummy weights"
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k or 0,  # vLLM's word for no limit
                max_tokens=min(max_new_tokens, self.max_total_tokens - len(prompt)),
                stop_token_ids=self.stop_token_ids,
                logprobs=0,  # of the sampled token only
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                seed=seed if temperature > 0 else None,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        engine, ended = self.llm.llm_engine, {}
        for number, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, how)
        for steps in count(1):
            if not engine.has_unfinished_requests():
                return [_completion(ended[str(number)]) for number in range(len(prompts))]
            if interruptible and steps % STEPS_BETWEEN_STOPS == 0 and self.stop():
                engine.abort_request([str(number) for number in range(len(prompts)) if str(number) not in ended])
                raise Interrupted
            ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Streams full tensors by HF name into the engine, in place, and forgets everything computed with the old ones.

        On CUDA the caller has woken "weights" and wakes "kv_cache" afterwards (peers.md 3: vllm#15254). Raises
        StopRun when the names sent are not exactly the engine's parameters: vLLM itself would only warn.
        """
        sent: set[str] = set()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._engine_weights(weights, sent)})
        if sent != self.param_names:
            missing, unknown = sorted(self.param_names - sent), sorted(sent - self.param_names)
            raise StopRun(f"weight sync: the engine did not get its {missing[:5]}, and has no {unknown[:5]}")
        if not self.llm.reset_prefix_cache():
            raise StopRun("weight sync: vLLM did not drop its prefix cache, whose keys are of the old weights")
        self.weight_version = version

    def _engine_weights(self, weights: Iterable[tuple[str, torch.Tensor]], sent: set[str]):
        for name, tensor in weights:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensor = tensor[: self.vocab_size]
            sent.add(name)
            shape = self.shapes.setdefault(name, list(tensor.shape))
            if shape != list(tensor.shape):
                raise StopRun(f"weight sync: {name} has shape {list(tensor.shape)}, before {shape}")
            yield name, tensor
            if name == "model.embed_tokens.weight" and self.send_head_copy:
                sent.add("lm_head.weight")
                yield "lm_head.weight", tensor

    def sleep(self) -> None:
        """Gives the GPU's memory to the trainer (weights to host memory, KV cache dropped). CPU: nothing to give."""
        if self.cuda:
            self.llm.sleep(level=1)

    def wake(self, what: str) -> None:
        """`what`: "weights" (then sync), then "kv_cache"."""
        if self.cuda:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[what])


def _completion(output) -> Completion:
    ids = list(output.token_ids)
    logps = [
        entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)
    ]  # not "the first" (RL#3297)
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    return Completion(np.asarray(ids, np.int32), np.asarray(logps, np.float32), output.finish_reason)


def _checkpoint_names(model: torch.nn.Module) -> set[str]:
    """Names of the engine's parameters as checkpoints have them: q_proj, k_proj and v_proj, not the fused qkv_proj."""
    names = set()
    for name, _ in model.named_parameters():
        fused = next((part for part in name.split(".") if part in model.packed_modules_mapping), None)
        parts = model.packed_modules_mapping[fused] if fused else [None]
        names |= {name.replace(fused, part) if fused else name for part in parts}
    return names


def sample_seed(*key: int) -> int:
    """A 48-bit seed from e.g. (run seed, step, prompt, sample): a resumed run samples what an unbroken one would."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True)
class Conversation:
    """One sample in the making: `ids` are all after the prompt, sampled (mask True) or an observation's (logp 0)."""

    prompt: int
    row: Problem
    index: int
    messages: list[dict]
    ids: list[np.ndarray] = field(default_factory=list)
    logps: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    results: list[envs.StepResult] = field(default_factory=list)
    finish_reason: str = ""  # of the last reply; of the whole as soon as `done`
    done: bool = False

    @property
    def token_ids(self) -> list[int]:
        """What the engine goes on from: exactly the ids so far."""
        return [*self.row.prompt_ids, *(int(i) for ids in self.ids for i in ids)]

    def add_reply(self, completion: Completion, tokenizer: Tokenizer) -> None:
        self.ids.append(completion.ids)
        self.logps.append(completion.logps)
        self.mask.append(np.ones(len(completion.ids), bool))
        self.finish_reason = completion.finish_reason
        self.messages.append({"role": "assistant", "content": tokenizer.decode(completion.ids)})

    def add_result(self, result: envs.StepResult, tokenizer: Tokenizer, max_total_tokens: int, is_last: bool) -> None:
        """Ends the conversation, or appends the observation, if a reply has room behind it. A reward that is not finite
        is none: outcome `error`, counted as such."""
        assert result.outcome in envs.OUTCOMES, result
        if not np.isfinite([result.reward, *result.rewards.values()]).all():
            result = replace(result, reward=0.0, rewards=dict.fromkeys(result.rewards, 0.0), outcome="error", done=True)
        self.results.append(result)
        self.done = result.done or self.finish_reason == "length"  # half a reply is no turn to answer to
        if self.done:
            return
        if is_last:
            self.done, self.finish_reason = True, "max_turns"
            return
        before, observation = self.messages[:-1], list(result.observation)
        ids = tokenizer.observation_ids(before, self.ids[-1].tolist(), observation, self.row.tools)
        if len(self.token_ids) + len(ids) >= max_total_tokens:
            self.done, self.finish_reason = True, "length"
            return
        self.ids.append(np.asarray(ids, np.int32))
        self.logps.append(np.zeros(len(ids), np.float32))
        self.mask.append(np.zeros(len(ids), bool))
        self.messages += observation

    def sample(self, weight_version: int) -> Sample:
        mask = np.concatenate(self.mask)
        rewards: dict[str, float] = {}
        for name, value in (item for result in self.results for item in result.rewards.items()):
            rewards[name] = rewards.get(name, 0.0) + value
        return Sample(
            prompt=self.prompt,
            index=self.index,
            row_id=self.row.row_id,
            prompt_ids=self.row.prompt_ids,
            output_ids=np.concatenate(self.ids),
            sampler_logps=np.concatenate(self.logps),
            mask=mask if self.row.loss_multiplier else np.zeros_like(mask),
            finish_reason=self.finish_reason,
            weight_version=weight_version,
            reward=sum(result.reward for result in self.results),
            rewards=rewards,
            outcome=self.results[-1].outcome,
            extracted=self.results[-1].extracted,
            env_name=self.row.env_name,
            dataset=self.row.dataset,
            num_turns=len(self.results),
            num_env_tokens=int((~mask).sum()),
            messages=self.messages if self.row.env_name == "reward_model" else [],
        )


def rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    environments: dict[str, envs.Environment],
    prompts: Sequence[tuple[int, Problem]],
    *,
    num_samples: int,
    seed_key: tuple[int, ...],
    max_turns: int = 1,
    ranks: Ranks | None = None,
    **how: float | None,
) -> list[Sample]:
    """Samples `num_samples` conversations for each (index in the step, row), each turn graded. how: `generate`'s.

    Returns samples ordered by (prompt, index), with reward and outcome. A turn is a reply of at most max_new_tokens
    and, while the environment is not done, its observation: the tokens that the chat template adds, appended to those
    that were sampled. finish_reason: "stop" (the environment was done), "length" (a reply was cut, or the next one has
    no room within max_total_tokens), "max_turns" (it would have gone on). `ranks`: where an engine has several, its
    first one grades: graders that work against time would not tell all of them the same.
    """
    talks = [
        Conversation(prompt, row, index, list(row.messages)) for prompt, row in prompts for index in range(num_samples)
    ]
    for turn in range(max_turns):
        live = [talk for talk in talks if not talk.done]
        if not live:
            break
        later = (turn,) if turn else ()  # of the first turn seeds are as if there were no others
        seeds = [sample_seed(*seed_key, talk.prompt, talk.index, *later) for talk in live]
        for talk, completion in zip(live, engine.generate([t.token_ids for t in live], seeds, **how), strict=True):
            talk.add_reply(completion, tokenizer)
        graded = partial(grade, live, environments)
        results = ranks.broadcast_from_tp_leader(graded) if ranks else graded()
        if results is None:
            raise Interrupted
        for talk, result in zip(live, results, strict=True):
            talk.add_result(result, tokenizer, engine.max_total_tokens, turn == max_turns - 1)
    return [talk.sample(engine.weight_version) for talk in talks]


def rollout_over_ranks(
    engine: Engine,
    tokenizer: Tokenizer,
    environments: dict[str, envs.Environment],
    prompts: Sequence[tuple[int, Problem]],
    *,
    ranks: Ranks,
    max_error_fraction: float = 1.0,
    **how,
) -> list[Sample]:
    """`rollout` of prompts that all ranks name alike: each engine takes its share, every rank gets all samples.

    StopRun when more than `max_error_fraction` of them could not be graded: their rewards would be noise. Interrupted,
    on all ranks, when any of them was told to stop meanwhile: the others finish their share first.
    """
    mine = prompts[ranks.dp_rank :: ranks.dp_size]
    try:
        own = rollout(engine, tokenizer, environments, mine, ranks=ranks, **how)
    except Interrupted:
        own = None
    samples = gather_samples(own, ranks)
    provisional = [sample for sample in samples if sample.env_name == "reward_model"]
    if provisional:
        score_by_model(provisional, environments["reward_model"], engine)
    failed = Counter(s.env_name for s in samples if s.outcome == "error")
    if failed.total() > max_error_fraction * len(samples):
        raise StopRun(
            f"{failed.total()} of {len(samples)} answers could not be graded ({dict(failed)}), more than "
            f"env.max_error_fraction={max_error_fraction:g}: see the environment's own messages above"
        )
    return samples


def gather_samples(samples: list[Sample] | None, ranks: Ranks) -> list[Sample]:
    """All ranks' samples on every rank, ordered by (prompt, index). Interrupted where one has None."""
    parts: list = [None] * ranks.world_size
    dist.all_gather_object(parts, samples if ranks.leads_engine or samples is None else [])
    if any(part is None for part in parts):
        raise Interrupted
    return sorted((s for part in parts for s in part), key=lambda s: (s.prompt, s.index))


def score_by_model(samples: Sequence[Sample], environment: envs.RewardModelEnv, engine: Engine) -> None:
    """Gives samples the reward model's scores, a collective of all ranks; the engine makes room for it meanwhile."""
    engine.sleep()
    for sample, score in zip(samples, environment.score([s.messages for s in samples]), strict=True):
        sample.reward, sample.outcome = (0.0, "error") if score is None else (score, "ok")
    engine.wake("weights")
    engine.wake("kv_cache")


def grade(talks: Sequence[Conversation], environments: dict[str, envs.Environment]) -> list[envs.StepResult] | None:
    """A result on the last reply of each; one call per environment. None when told to stop meanwhile."""
    results: dict[int, envs.StepResult] = {}
    for name, environment in environments.items():
        mine = [i for i, talk in enumerate(talks) if talk.row.env_name == name]
        turns = []
        for talk in (talks[i] for i in mine):
            state = talk.results[-1].state if talk.results else {}
            turns.append(envs.Turn(talk.messages, talk.row.answer, talk.finish_reason, state, talk.row.fields))
        try:
            results |= zip(mine, environment.step(turns) if turns else [], strict=True)
        except Interrupted:
            return None
    return [results[i] for i in range(len(talks))]
