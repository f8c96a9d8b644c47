"""A rank from its start to its exit code: what a process knows before there is a model, and the run that trains."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from base.check.command_line import gpu_memory, parse_command_line
from base.check.rules import must_save_by_seconds
from base.check.summary import data_lines, notes, template_notes
from base.inputs.checkpoints import checkpoint_folder
from base.inputs.run_inputs import RunInputs, num_steps_of, read_inputs, start_environments
from base.system.exits import NO_PEERS, Signals, report_exit
from base.system.optimizer import Optimizer
from base.system.progress import Progress
from base.system.ranks import Ranks, on_rank0, start_process_group
from base.system.watchdog import Watchdog
from config import Config, ConfigError
from head import HeadOptions
from model import Decoder
from optim import EntropyBonus, build_optimizer
from records import Engine
from rollout import Sampler
from run import checkpoint
from run.build import build, build_head, build_reference, build_sampler, hash_of_base
from run.folder import open_run_folder
from run.log import RunLog, Timers

if TYPE_CHECKING:
    from reference import Reference
    from run.memory import Memory
    from run.split.generators import Generators


@dataclass(slots=True)
class RunState:
    """The run's counters, which checkpoints keep. There is no other state: sampling seeds are f(seed, step, prompt,
    sample), and the data order is f(seed, epoch)."""

    cursor: dict
    fingerprints: dict[str, str]
    step: int = 0
    num_bad_steps: int = 0
    bonus: EntropyBonus = field(default_factory=EntropyBonus)
    total_valid_tokens: float = 0
    first_validation: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)
    base_sha256: str | None = None  # of the weights that LoRA has frozen
    selections: dict[str, str] = field(default_factory=dict)  # of Mixture.saved_selections, when a checkpoint was saved


@dataclass
class Job:
    """What grpo.py and eval.py know before they build a model. memory: where that of a GPU is known. watchdog: of a run
    that trains."""

    cfg: Config
    inputs: RunInputs
    ranks: Ranks
    device: torch.device
    folder: Path
    memory: "Memory | None"
    watchdog: Watchdog | None


@dataclass
class Run(Job):
    """Everything that lives from the first step to the last."""

    model: Decoder
    head_options: HeadOptions
    optimizer: Optimizer
    engine: Engine
    sampler: "Sampler | Generators"
    reference: "Reference | None"
    state: RunState
    saver: checkpoint.Saver
    signals: Signals
    timer: Timers
    num_steps: int
    log: RunLog | None = None  # rank 0's
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step
    told_to_stop: bool = False  # by a signal to any rank, as of the end of the newest step

    @property
    def is_finished(self) -> bool:
        """After the last step, or when max_num_epochs leaves too few prompts for another: dynamic sampling may have
        drawn more than one batch a step. A step may draw into the next epoch: stopping it would waste its groups."""
        if self.state.step >= self.num_steps:
            return True
        num_drawn = self.state.cursor["position"]
        num_after_next_batch = num_drawn + self.cfg.grpo.prompts_per_batch
        return num_after_next_batch > self.cfg.grpo.max_num_epochs * self.inputs.train.num_problems


def run_rank(
    usage: str, words: Sequence[str], work: Callable[[Job], str], *, to_train: bool = True, reads_data: bool = True
) -> int:
    """One rank from start to exit code. work: returns why the run ended. Without to_train there is no watchdog; without
    reads_data the job has a model alone."""
    folder = watchdog = memory = job = None
    peers = NO_PEERS
    try:
        gpu_bytes, words = gpu_memory(words)
        cfg = parse_command_line(words, usage, reads_data)
        generation = cfg.policy.generation
        split = None
        if generation.num_generators:
            from run.split import bridge

            split = partial(bridge.split, num_generators=generation.num_generators)
        ranks, device = start_process_group(generation.vllm_cfg.tensor_parallel_size, split)
        peers = ranks.peers
        cfg = on_rank0(lambda: cfg, ranks.job)  # resume=auto: another rank may have found another run
        on_first_rank = partial(on_rank0, group=ranks.job)
        inputs = read_inputs(cfg, to_train=to_train, reads_data=reads_data, on_rank0=on_first_rank)
        start_environments(inputs, on_first_rank)
        knows_gpu = device.type == "cuda" or gpu_bytes is not None
        if knows_gpu:
            from run.memory import Memory, plan_memory  # a run on a CPU does without

            plan = plan_memory(cfg, inputs, ranks, gpu_bytes, to_train)
            cfg = plan.cfg
        folder = open_run_folder(cfg, ranks, to_train=to_train)
        watchdog = Watchdog(ranks, folder, cfg.watchdog) if to_train else None
        if knows_gpu:
            memory = Memory(plan, ranks)
        job = Job(cfg, inputs, ranks, device, folder, memory, watchdog)
        code = 0
        reason = work(job)
    except BaseException as error:
        if job:
            from run.memory import Memory, plan_memory

            memory = memory or Memory(plan_memory(cfg, inputs, ranks, None, to_train), ranks)
            error = memory.explained(error, watchdog.phase if watchdog else "evaluation")
        from base.system.failure import describe_failure

        code, reason = describe_failure(error, folder, peers)
    if watchdog:
        watchdog.stop()
    report_exit(code, reason, folder, peers)
    return code


def set_up(job: Job) -> Run:
    """A run that is ready for its first step, or for the step after its checkpoint. A collective of all trainers."""
    cfg = job.cfg
    inputs = job.inputs
    ranks = job.ranks
    device = job.device
    memory = job.memory
    if memory:
        keeps_gathered = memory.plan.keeps_gathered
    else:
        keeps_gathered = cfg.policy.dtensor_cfg.keeps_single_shard(ranks.world_size)
    signals = Signals(must_save_by_seconds(cfg.checkpointing))
    head_options = build_head(cfg, inputs, device)
    model, sampler = build(cfg, inputs, ranks, device, signals.pending, keeps_gathered=keeps_gathered)
    ranks.print_rank0(head_options.describe(model.config.vocab_size))
    if torch.cuda.is_available():
        from base.system.allocator import expand_segments

        expand_segments()  # vLLM has made its memory pools, and sleeps
    if memory:
        memory.note_engine()
    base_sha256 = hash_of_base(cfg, inputs, ranks)
    if ranks.bridge:
        for environment in inputs.environments.values():  # the generators grade
            environment.close()
    run = Run(
        **vars(job),
        model=model,
        head_options=head_options,
        optimizer=build_optimizer(model, cfg.policy.optimizer, offloads=cfg.policy.offload_optimizer_for_logprob),
        engine=sampler.engine,
        sampler=sampler,
        reference=build_reference(cfg, inputs, model, device),
        state=RunState(inputs.train.start(), inputs.train.fingerprints, base_sha256=base_sha256),
        saver=checkpoint.Saver(checkpoint_folder(cfg.checkpointing, job.folder), cfg.checkpointing, ranks),
        signals=signals,
        timer=Timers(job.watchdog.enter),
        num_steps=num_steps_of(cfg, inputs.train.num_problems),
    )
    with Progress("start, 3 of 3: checkpoint"):
        restore(run)
    if not run.is_finished:  # else there is no next prompt
        ranks.print_rank0("\n".join(data_lines(cfg, inputs, run.state.cursor)))
    for note in (*notes(cfg, inputs.model_config, run.num_steps), *template_notes(cfg, inputs)):
        ranks.print_rank0(f"NOTE: {note}")
    if ranks.rank == 0:
        num_sets = max(1, len(inputs.validation))
        num_print_of_set = math.ceil(cfg.logger.num_val_samples_to_print / num_sets)
        logger = replace(cfg.logger, num_val_samples_to_print=num_print_of_set)
        run.log = RunLog(run.folder, logger, first_step=run.state.step + 1, num_steps=run.num_steps)
    return run


def generate(job: Job) -> str:
    """Runs a generator of a split job to its end; returns why it ended."""
    from run.split.generators import serve

    signals = Signals(must_save_by_seconds(job.cfg.checkpointing))
    sampler = build_sampler(job.cfg, job.inputs, job.ranks, job.device, signals.pending)
    with sampler:
        serve(sampler, job.device, job.watchdog)
    return "the trainers need no more samples"


def restore(run: Run) -> None:
    """Continues from the checkpoint that the config resumes, if it does."""
    if run.cfg.checkpointing.resume_from:
        _resume(run)
    elif any(run.saver.folder.glob("step_*")):
        raise ConfigError(f"{run.saver.folder} holds checkpoints of another run: choose another checkpoint_dir")


def _resume(run: Run) -> None:
    """Loads the checkpoint that the config resumes: weights, the optimizer's state, the reference and the counters."""
    from base.inputs.resume import check_same_data  # a run that resumes none does without these
    from run.restore import load

    cfg = run.cfg.checkpointing
    train = run.inputs.train
    folder = run.saver.folder
    reference_shards = run.reference.shards if run.reference else {}
    base_sha256 = run.state.base_sha256
    counters = load(folder, cfg, run.model, run.optimizer, run.ranks, reference_shards, base_sha256)
    counters["bonus"] = EntropyBonus(**counters.get("bonus", {}))
    state = RunState(**counters)
    run.state = state
    run.saver.saved = state.step
    if cfg.allow_changes and state.fingerprints != train.fingerprints:
        run.ranks.print_rank0(
            "WARNING: the data have changed (checkpointing.allow_changes=true): reading starts at their first row"
        )
        state.cursor = train.start()
        state.fingerprints = train.fingerprints
        state.selections = {}
    train.restore_selections(state.selections)
    check_same_data(train, state.fingerprints, cfg.resume_from)
    run.ranks.print_rank0(f"resumed from {folder / f'step_{state.step:06d}'}")
