"""Rows -> chat messages -> token ids -> packs: everything about data that needs no GPU library.

Owns: the torch-free half of a model folder (config.json, tokenizer, chat template), reading datasets, their order as
f(seed, epoch), and the two records that travel through a step: `Sample` (what the engine produced) and `Pack` (what the
trainer eats). Does not own: grading (envs.py), generation (rollout.py). Imports neither torch nor vllm, so that
`grpo.py --check` answers in under two seconds.

Dims: `P` prompts of a step, `B` samples, `T` packed tokens, `R` response rows (rows of T whose next token was sampled),
`S` sequences of a pack.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers

from config import ConfigError, DatasetConfig
from model_config import ModelConfig, weight_files


class DataError(ConfigError):
    """A dataset or model folder the run cannot use; the message names the file and the fix. Process exit code 2."""


# ---------------------------------------------------------------------------------------------------- model folder


def resolve_model_folder(name: str) -> Path:
    """A local HF folder, or a hub name (`org/model`), -> a checked local folder. Raises DataError."""
    folder = Path(name)
    # os.path: unlike Path's, these say no to a name that is too long for the file system
    if not os.path.exists(folder) and name.count("/") == 1 and not name.startswith((".", "/")):
        folder = _download(name)
    if not os.path.isdir(folder):
        raise DataError(f"policy.model_name: no folder '{name}' (give a Hugging Face folder or a hub name org/model)")
    read_model_config(folder)
    weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder}: no tokenizer.json (save the tokenizer in its 'fast' format)")
    return folder


def _download(name: str) -> Path:
    import huggingface_hub  # on demand: a local folder needs no network library
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"policy.model_name: '{name}' is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}); without network, download it elsewhere and give the folder's path"
        ) from error


def read_model_config(folder: Path) -> ModelConfig:
    """The folder's config.json. ConfigError where the model is not supported."""
    return ModelConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))


def read_json(path: Path) -> dict:
    """A JSON object from `path`; DataError names the file (and line) when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def check_writable(key: str, folder: str) -> None:
    """ConfigError when `folder`, the value of config key `key`, could not be made or written; makes nothing."""
    path = Path(folder).absolute()
    if "\0" in folder or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ConfigError(f"{key}={folder!r}: a name in it is longer than 255 bytes, or has a byte 0")
    while not os.path.exists(path):  # unlike Path.exists, also false below a folder that must not be searched
        path = path.parent
    if not path.is_dir():
        raise ConfigError(f"{key}={folder}: {path} is a file, not a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: no permission to write in {path}")


class Tokenizer:
    """`tokenizer.json` plus the model's chat template: messages -> prompt ids, ids -> text.

    `vocab_size` is one past the largest id the tokenizer knows. A checkpoint's vocabulary may be padded beyond it;
    those ids are banned on both sides (DESIGN 4), or the engine samples ids that cannot be decoded (vllm#13175).
    """

    def __init__(self, folder: Path):
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for a malformed file
            raise DataError(f"{folder / 'tokenizer.json'}: not a usable tokenizer ({error})") from error
        self.backend.no_truncation()  # the file may ask for both; transformers ignores it too
        self.backend.no_padding()
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise DataError(f"{folder / 'tokenizer.json'}: its vocabulary is empty")
        self.settings_file = folder / "tokenizer_config.json"
        self.settings = read_json(self.settings_file) if self.settings_file.is_file() else {}
        self.special = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.template = self._template(folder)
        self.eos_token_ids = self._eos_token_ids(folder)

    def _template(self, folder: Path) -> jinja2.Template | None:
        file = folder / "chat_template.jinja"
        text = _read_text(file) if file.is_file() else self.settings.get("chat_template")
        if isinstance(text, list):  # HF's named templates: [{"name": "default", "template": ...}, ...]
            if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in text):
                raise DataError(f"{self.settings_file}: chat_template: a list must be of {{name, template}}")
            text = next((entry["template"] for entry in text if entry["name"] == "default"), None)
        if text is None:
            return None
        if not isinstance(text, str):
            raise DataError(f"{self.settings_file}: chat_template: expected text, got {type(text).__name__}")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(text)
        except Exception as error:  # jinja2 compiles it to Python, which has errors of its own
            raise DataError(f"{folder}: the chat template does not parse ({error})") from error

    def _eos_token_ids(self, folder: Path) -> list[int]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
            found = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token_id) is not int or token_id < 0 for token_id in found):
                raise DataError(f"{folder / name}: eos_token_id: expected an id or a list of ids, got {value!r}")
            ids += found
        token = self.special["eos_token"]
        if token and (token_id := self.backend.token_to_id(token)) is not None:
            ids.append(token_id)
        if not ids:
            raise DataError(
                f"{folder}: no eos_token_id in generation_config.json, config.json or tokenizer_config.json"
            )
        return sorted(set(ids))

    def _special(self, key: str) -> str:
        value = self.settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value or ""
        if not isinstance(text, str):
            raise DataError(f"{self.settings_file}: {key}: expected text or {{content: text}}, got {value!r}")
        return text

    def render(self, messages: Sequence[dict]) -> list[int]:
        """Chat messages -> prompt ids, with the template's own opening of the assistant's turn at the end.

        Without a template (a base model): the messages' text, behind what the tokenizer opens a text with (Llama's
        BOS). What it closes a text with is left off: the reply goes on from there. Raises whatever a template raises.
        """
        if self.template is None:
            text = "".join(message["content"] for message in messages)
            plain = self.backend.encode(text, add_special_tokens=False).ids
            whole = self.backend.encode(text, add_special_tokens=True).ids
            start = next(i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
            return whole[: start + len(plain)] if plain else []
        text = self.template.render(messages=messages, add_generation_prompt=True, **self.special)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text without special tokens: for graders and people, never to be encoded again (slime#117)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


# -------------------------------------------------------------------------------------------------------- datasets


@dataclass(frozen=True, slots=True)
class Row:
    """One problem. `row_id` is its index in the file, so that logs can point at it."""

    row_id: int
    messages: list[dict]
    answer: str
    env_name: str
    prompt_ids: list[int]

    @property
    def line(self) -> int:
        """Its line in the file, counted from 1."""
        return self.row_id + 1


@dataclass(frozen=True, slots=True)
class Dataset:
    """All usable rows of one file, their fingerprint (checked on resume), and how many prompts were too long."""

    path: str
    rows: list[Row]
    num_too_long: int
    fingerprint: str


def load_dataset(cfg: DatasetConfig, tokenizer: Tokenizer, max_prompt_tokens: int) -> Dataset:
    """Reads `cfg.data_path`: jsonl with a `messages` list or text under `cfg.input_key`, answer under `cfg.output_key`.

    Policy for prompts longer than `max_prompt_tokens`: the row is left out and counted; a cut prompt would ask another
    question. Raises DataError with file and line for anything malformed, and when no row is left.
    """
    path = Path(cfg.data_path)
    system = _read_text(cfg.system_prompt_file) if cfg.system_prompt_file else None
    prompt = _read_text(cfg.prompt_file) if cfg.prompt_file else "{}"
    if prompt.count("{}") != 1:
        raise DataError(f"{cfg.prompt_file}: needs exactly one {{}} where the input goes, has {prompt.count('{}')}")
    rows, num_too_long, digest = [], 0, hashlib.sha256()
    for line_number, raw in _jsonl(path):
        where = f"{path}:{line_number}"
        messages = _messages(raw, cfg, prompt, system, where)
        if cfg.output_key not in raw:
            raise DataError(f"{where}: no key '{cfg.output_key}'; keys: {', '.join(map(str, raw))} (see output_key)")
        try:
            ids = tokenizer.render(messages)
        except Exception as error:  # a template is a program; TypeError also: half a surrogate pair is not text
            said = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(f"{where}: the chat template refuses these messages ({said})") from error
        if not ids:
            raise DataError(f"{where}: the prompt is empty")
        if len(ids) > max_prompt_tokens:
            num_too_long += 1
            continue
        row = Row(line_number - 1, messages, str(raw[cfg.output_key]), cfg.env_name, ids)
        digest.update(json.dumps([row.row_id, row.prompt_ids, row.answer, row.env_name]).encode())
        rows.append(row)
    if not rows:
        why = (
            f"all {num_too_long} prompts are longer than {max_prompt_tokens} tokens" if num_too_long else "it is empty"
        )
        raise DataError(f"{path}: no usable row: {why}")
    return Dataset(str(path), rows, num_too_long, digest.hexdigest())


def _read_text(name: str | Path) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a byte 0 in the name
        raise DataError(f"{name}: cannot be read ({error})") from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    if "\0" in str(path):
        raise DataError(f"{str(path)!r}: cannot be read (a byte 0 in the name)")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    raw = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
                    raise DataError(f"{path}:{number}: not valid JSON ({error})") from error
                if not isinstance(raw, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object, got {type(raw).__name__}")
                yield number, raw
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _messages(raw: dict, cfg: DatasetConfig, prompt: str, system: str | None, where: str) -> list[dict]:
    if "messages" in raw:
        messages = raw["messages"]
        well_formed = (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
        )
        if not well_formed:
            raise DataError(f"{where}: 'messages' must be a non-empty list of {{role, content}} with text in both")
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{where}: the last message is the assistant's; the policy is asked to write that one")
    elif isinstance(raw.get(cfg.input_key), str):
        messages = [{"role": "user", "content": prompt.replace("{}", raw[cfg.input_key])}]
    else:
        raise DataError(
            f"{where}: neither 'messages' nor text under '{cfg.input_key}'; keys: {', '.join(map(str, raw))} "
            f"(see input_key)"
        )
    return [{"role": "system", "content": system}, *messages] if system else messages


def rows_at(num_rows: int, position: int, count: int, *, seed: int, shuffle: bool) -> list[int]:
    """Indices of the `count` rows from global `position` on: epoch e is the permutation f(seed, e), epochs follow on.

    A function of its arguments alone: the same on any number of ranks, and a saved `position` resumes exactly.
    """
    picked, orders = [], {}
    for k in range(position, position + count):
        epoch, offset = divmod(k, num_rows)
        if epoch not in orders:
            generator = np.random.Generator(np.random.PCG64([seed, epoch]))
            orders[epoch] = generator.permutation(num_rows) if shuffle else np.arange(num_rows)
        picked.append(int(orders[epoch][offset]))
    return picked


# ------------------------------------------------------------------------------------------------ samples and packs


@dataclass(slots=True)
class Sample:
    """One sampled conversation: exactly the ids the engine saw and produced; never decoded and encoded again.

    Example (single turn): prompt_ids [5, 7, 2], output_ids [9, 3], sampler_logps [-.1, -.7], mask [True, True].
    `mask` is False on output ids that were not sampled (an environment's observation). `prompt` is the index of the
    prompt in the step: groups are built from it, never from text. reward, rewards (of each kind, where there are
    several), outcome and extracted (the answer found in the reply) are filled in by the grader; unshaped_reward (after
    scaling, before shaping) by shaping.py. Overlong filtering clears `mask`, so lengths come from output_ids.
    """

    prompt: int
    index: int
    row_id: int
    prompt_ids: list[int]
    output_ids: np.ndarray
    sampler_logps: np.ndarray
    mask: np.ndarray
    finish_reason: str
    weight_version: int
    reward: float = float("nan")
    outcome: str = "ungraded"
    unshaped_reward: float = float("nan")
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    env_name: str = ""
    num_env_tokens: int = 0

    @property
    def num_gen_tokens(self) -> int:
        """Ids that the policy sampled."""
        return len(self.output_ids) - self.num_env_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Pack:
    """Whole sequences back to back, without padding. Input ids are ids[:-1] of each sequence, targets ids[1:].

    token_T, position_T int64 · cu_seqlens int32 [S+1] · row_R int64: rows of T whose target was sampled · target_R
    int64 · sampler_logp_R float32 · adv_R, reward_R float32 of the row's sample · seq_R int64: number of the row's
    sequence within the pack.
    Every response row is trained on; rows that are not (prompt, observation) never reach the head.
    """

    token_T: np.ndarray
    position_T: np.ndarray
    cu_seqlens: np.ndarray
    row_R: np.ndarray
    target_R: np.ndarray
    sampler_logp_R: np.ndarray
    adv_R: np.ndarray
    seq_R: np.ndarray
    reward_R: np.ndarray


def assign_to_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of the samples each rank trains on: longest first to the least loaded rank, ties to the lowest rank."""
    load, assigned = [0] * world_size, [[] for _ in range(world_size)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (load[r], len(assigned[r]), r))
        load[rank] += lengths[i]
        assigned[rank].append(i)
    return assigned


def pack_samples(samples: Sequence[Sample], adv_B: Sequence[float], max_tokens: int) -> list[Pack]:
    """First-fit decreasing into packs of <= `max_tokens` input tokens.

    Longest first also puts sequences of equal length side by side, which the CPU attention takes as one call.
    """
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(samples)), key=lambda i: (-samples[i].num_tokens, i)):
        length = samples[i].num_tokens - 1
        assert length <= max_tokens, f"sample of {length} tokens, packs of {max_tokens}: config_check forbids this"
        for b, (used, members) in enumerate(bins):
            if used + length <= max_tokens:
                bins[b] = (used + length, [*members, i])
                break
        else:
            bins.append((length, [i]))
    return [_pack([samples[i] for i in members], [adv_B[i] for i in members]) for _, members in bins]


def _pack(samples: list[Sample], adv_S: list[float]) -> Pack:
    tokens, positions, rows, targets, logps, advs, seqs, rewards, cu = [], [], [], [], [], [], [], [], [0]
    for s, (sample, adv) in enumerate(zip(samples, adv_S, strict=True)):
        ids = np.concatenate([np.asarray(sample.prompt_ids, np.int64), sample.output_ids.astype(np.int64)])
        sampled = np.flatnonzero(sample.mask)
        row = len(sample.prompt_ids) + sampled - 1  # the row that predicts the sampled id
        rows.append(cu[-1] + row)
        targets.append(ids[row + 1])
        logps.append(sample.sampler_logps[sampled])
        advs.append(np.full(len(row), adv))
        seqs.append(np.full(len(row), s))
        rewards.append(np.full(len(row), sample.reward))
        tokens.append(ids[:-1])
        positions.append(np.arange(len(ids) - 1))
        cu.append(cu[-1] + len(ids) - 1)
    return Pack(
        token_T=np.concatenate(tokens),
        position_T=np.concatenate(positions),
        cu_seqlens=np.asarray(cu, np.int32),
        row_R=np.concatenate(rows),
        target_R=np.concatenate(targets),
        sampler_logp_R=np.concatenate(logps).astype(np.float32),
        adv_R=np.concatenate(advs).astype(np.float32),
        seq_R=np.concatenate(seqs),
        reward_R=np.concatenate(rewards).astype(np.float32),
    )


def empty_pack() -> Pack:
    """One token, no response row: what a rank with fewer packs runs so that every rank joins every collective."""
    zero, none, none_f = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    return Pack(zero, zero, np.asarray([0, 1], np.int32), none, none, none_f, none_f, none, none_f)
