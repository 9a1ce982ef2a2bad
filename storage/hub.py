"""Sending an exported model or dataset to the Hugging Face Hub, or to a server that speaks its interface
(``HF_ENDPOINT``). Only ``posttrain export --push`` does it.
"""

from __future__ import annotations

from pathlib import Path

from storage.store import StoreError

#: Files of an earlier push that would be read beside those of this one: shards under other names.
REPLACED = {"model": ["*.safetensors", "*.safetensors.index.json"], "dataset": ["data/*.parquet"]}


class HubError(StoreError):
    """A repository cannot be written to; the message says what to do."""


def repository(repo_id: str, kind: str, private: bool) -> None:
    """Make sure of a repository of a ``kind`` ("model" or "dataset") to push to: it is made where there is none.

    The token is what ``HF_TOKEN`` or ``hf auth login`` says. ``private``: nobody but its owner may see it.

    Raises:
        HubError: offline, no or the wrong token, not a name that a repository can have, or an existing public
            repository where a private one is asked for.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.utils import HFValidationError, HfHubHTTPError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"--push {repo_id!r} is no name of a repository ({error}); write OWNER/NAME") from error
    if repo_id.count("/") != 1:
        raise HubError(f"--push {repo_id!r} does not say whose it is; write OWNER/NAME")
    if is_offline_mode():
        raise HubError(
            "HF_HUB_OFFLINE forbids to reach the Hub; unset it for --push, or export to a directory and run `hf upload`"
            " where there is a network"
        )
    if not get_token():
        raise HubError(
            "there is no token for the Hub; write HF_TOKEN=... in front of the command, or run `hf auth login` once"
            " (the token needs the right to write)"
        )
    api = HfApi()
    try:
        try:
            api.create_repo(repo_id, repo_type=kind, private=private or None)
            return
        except HfHubHTTPError as error:
            # it may be there, and this token may write to it without being allowed to make it
            if error.response.status_code not in (403, 409):
                raise
            try:
                found = api.repo_info(repo_id, repo_type=kind)
            except HfHubHTTPError:
                raise error from None
    except Exception as error:
        raise refused(error, repo_id, api.endpoint) from error
    if private and not found.private:
        raise HubError(
            f"{repo_id} is there already and public, so --private would not keep this from anybody; make it private in"
            " its settings, or push to another name"
        )


def push(directory: Path, repo_id: str, kind: str, message: str) -> str:
    """Commit a directory's files to a repository (:func:`repository`); returns the commit's address. Shards of an
    earlier push that this one has not are deleted with the same commit.

    Raises:
        HubError: see :func:`refused`.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=directory,
                repo_type=kind,
                commit_message=message,
                delete_patterns=REPLACED[kind],
            ).commit_url
        )
    except Exception as error:
        raise refused(error, repo_id, api.endpoint) from error


def refused(error: Exception, repo_id: str, endpoint: str) -> HubError:
    """What an error of the Hub's library means for who pushes."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if status == 401:
        return HubError(
            f"{endpoint} does not accept the token ({said}); write a valid one into HF_TOKEN, or run `hf auth login`"
            " again"
        )
    if status == 403:
        return HubError(
            f"{endpoint} does not let this token write to {repo_id} ({said}); take one with the right to write there,"
            " or another owner"
        )
    if status is not None:
        return HubError(f"{endpoint} refused {repo_id} with status {status}: {said}")
    return HubError(
        f"{endpoint} cannot be reached, or the transfer broke off ({type(error).__name__}: {said}); give the same"
        " command again, what has arrived is not sent twice"
    )
