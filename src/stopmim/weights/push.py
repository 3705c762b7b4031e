"""Uploads exports to the Hugging Face hub, or another with its protocol (``HF_ENDPOINT``)."""

import re
from pathlib import Path
from typing import Any

from stopmim.base.errors import StorageError, UserError
from stopmim.base.sandbox import one_line


def connect(repo: str) -> Any:
    """The hub's client; raises UserError if it cannot be asked to write to `repo`."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise UserError(f'--push: {error}; pip install "stopmim[hf]"') from None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"--push {repo}: expected USER/NAME, e.g. me/my-encoder")
    if get_token() is None:
        raise UserError("--push: not logged in to the hub; run hf auth login, or set HF_TOKEN")
    return HfApi()


def push(hub: Any, folder: Path, repo: str) -> str:
    """Uploads an export to the model repository `repo`, private if new; returns its address."""
    try:
        made = hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message="Export by stopmim"
        )
    except Exception as error:  # no network, no right to write, full: many types
        what = f"cannot be pushed: {one_line(error)}"
        raise StorageError(f"{repo}: {what}; the export itself is in {folder}") from None
    return str(made)
