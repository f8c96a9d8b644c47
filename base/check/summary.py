"""What `--check` and the start of a run print of their data and settings. No torch."""

from base.hf.model_config import ModelConfig
from base.inputs.keys import FIELDS
from base.inputs.mixing import Cursor
from base.inputs.run_inputs import RunInputs
from base.inputs.scan import Dataset
from config import Config

MAX_ROWS = 5_000  # --check reads this many rows of each set: half a second
SHOWN_CHARS = 200  # of a long prompt, this many are printed from each end


def data_lines(cfg: Config, inputs: RunInputs, cursor: Cursor) -> list[str]:
    """The training sets in a line, each with environment and size; the validation sets; then the next prompt as the
    model gets it and its answer."""
    texts: dict[str, list[str]] = {}
    for purpose, dataset in inputs.sets:
        texts.setdefault(purpose, []).append(_described(dataset))
    lines = [f"{purpose:10} {'; '.join(of_sets)}" for purpose, of_sets in texts.items()]
    if any(dataset.is_sample for _, dataset in inputs.sets):
        problem = inputs.sets[0][1].problems[0]  # the next one may be a row that was not checked
    else:
        count = cfg.grpo.prompts_per_batch if inputs.train.has_dataloader or inputs.train.selections else 1
        problem = inputs.train.draw(cursor, count)[0][0]
    prompt = inputs.tokenizer.backend.decode(problem.prompt_ids, skip_special_tokens=False)
    answer = _ends(problem.answer, SHOWN_CHARS // 4)
    row = f"row {problem.row_id} of {problem.dataset}"
    return [*lines, f"first      {row}: {_ends(prompt, SHOWN_CHARS)!r}, expected answer {answer!r}"]


def _described(dataset: Dataset) -> str:
    """A set with its environments, its size, and what was left out of it."""
    size = f"{len(dataset.problems):,} prompts"
    if dataset.is_sample and dataset.left_out:
        size = f"at most {size}"  # more may be left out of the other rows
    if dataset.is_sample:
        size += f", {MAX_ROWS:,} rows checked (the first {MAX_ROWS // 2:,}, the others at random; --all: every row)"
    if dataset.left_out:
        size += f", {dataset.left_out}"
    return f"{dataset.path}, graded by {', '.join(dataset.env_names)}: {size}"


def _ends(text: str, size: int) -> str:
    return text if len(text) <= 2 * size else f"{text[:size]} ... {text[-size:]}"


def notes(cfg: Config, model: ModelConfig, num_steps: int) -> list[str]:
    """What a user easily overlooks: a long warm-up, a low learning rate for LoRA."""
    found = []
    if model.whole is not None:
        kind = model.config_json["model_type"]
        found.append(f"only the text model of this {kind} is trained; the vision part is kept as it is")
    most_steps = cfg.grpo.max_num_steps
    if num_steps < most_steps != FIELDS["grpo.max_num_steps"].default:
        epochs = f"grpo.max_num_epochs={cfg.grpo.max_num_epochs}"
        found.append(f"{epochs} ends the run after {num_steps} steps, before grpo.max_num_steps={most_steps}")
    scheduler = cfg.policy.scheduler
    if 3 * scheduler.warmup_steps > num_steps and scheduler.warmup_start_factor != 1:
        warmup = f"policy.scheduler.warmup_steps={scheduler.warmup_steps}"
        found.append(f"{warmup} is more than a third of the run's {num_steps} steps: set fewer for a run this short")
    if cfg.policy.dtensor_cfg.lora_cfg.enabled:
        from base.check.lora_rate import low_rate

        found += low_rate(cfg.policy, model)
    if model.num_experts and cfg.policy.precision == "bfloat16" and not cfg.policy.router_replay.enabled:
        choice = "rounding to bfloat16 changes which experts a token is sent to"
        found.append(f"{choice}: policy.router_replay.enabled=true gives the trainer the sampler's choice")
    for layers in (model.family.state, model.family.unlike):
        if layers is not None and layers.note:
            found.append(layers.note)
    return found


def template_notes(cfg: Config, inputs: RunInputs) -> list[str]:
    """A chat template that ends turns as no reply ends, or that leaves out the tools of the data."""
    found = []
    tokenizer = inputs.tokenizer
    ends = cfg.policy.generation.stop_token_ids or tokenizer.eos_token_ids
    end = tokenizer.turn_end
    if end is not None and end not in ends:
        fix = f"policy.generation.stop_token_ids=[{', '.join(map(str, [end, *ends]))}]"
        token = f"{tokenizer.added[end]!r} ({end})"
        found.append(f"the chat template ends an assistant's turn with {token}, at which no reply ends: set {fix}")
    for purpose, dataset in inputs.sets:
        if dataset.hides_tools_at:
            fix = "policy.tokenizer.chat_template must write them, or the messages describe them"
            found.append(f"{purpose}: the chat template leaves out the tools of {dataset.hides_tools_at}: {fix}")
    return found
