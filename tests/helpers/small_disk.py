"""A disk that can be made full: a small tmpfs in a namespace of its own."""

import subprocess

import pytest

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def skip_without_mounts(folder):
    """Skips, with its reason, where this machine lets nobody mount over `folder` in a namespace."""
    try:
        mount = [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        allowed = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine: its disk cannot be made full")
    if allowed.returncode:
        pytest.skip(f"this machine allows no mount in a user namespace ({allowed.stderr.strip()}): no disk to fill")
