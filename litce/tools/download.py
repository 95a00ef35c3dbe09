"""`litce download`: a model of the Hugging Face hub as a litce checkpoint."""

import os
from pathlib import Path

from litce.args import UsageError
from litce.tools.convert_hf import CONFIG, COPIED, INDEX, convert, read_config, require_absent

# Weights in safetensors alone: what else there may be runs code when it is read.
FILES = (CONFIG, INDEX, "model*.safetensors", *COPIED)


def setup(repo_id: str, *, out_dir: Path | None = None) -> Path:
    """Download a model from the Hugging Face hub and make a litce checkpoint of it.

    Its configuration, safetensors and tokenizer come to Hugging Face's cache, where an interrupted download goes on and
    other programs find them; the checkpoint appears in out_dir when it is complete. A token for models that need one
    is taken from HF_TOKEN or from `hf auth login`.

    Args:
        repo_id: Name of the model at huggingface.co, such as HuggingFaceTB/SmolLM2-135M.
        out_dir: Folder to write to; null takes checkpoints/REPO_ID.

    Returns:
        The folder written to.

    Raises:
        UsageError: if the model cannot be downloaded, or is not supported.
    """
    out_dir = out_dir or Path("checkpoints", repo_id)
    require_absent(out_dir)
    snapshot = fetch(repo_id)
    if not any(snapshot.glob("model*.safetensors")):
        raise UsageError(
            f"{repo_id} has no model*.safetensors, and weights in other formats are not read; give another repository, "
            "or save it with transformers' save_pretrained and use litce convert_from_hf"
        )
    config = read_config(snapshot)
    config.name = repo_id.rpartition("/")[2]
    return convert(snapshot, out_dir, config)


def fetch(repo_id: str) -> Path:
    """The folder in Hugging Face's cache with a repository's newest `FILES`, downloaded as far as they were not there.

    Raises:
        UsageError: if there is no such repository, no access to it, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    # Read at each call, which the library does once, when it is imported.
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(FILES), ignore_patterns=["*/*"], endpoint=endpoint))
    except HFValidationError as error:
        raise UsageError(f"{repo_id!r} names no repository; give one such as HuggingFaceTB/SmolLM2-135M") from error
    except GatedRepoError as error:
        raise UsageError(
            f"{repo_id} is gated: accept its terms at {endpoint}/{repo_id}, and log in with `hf auth login` or HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{endpoint} has no {repo_id}, or it is private; check the name, or log in with `hf auth login` or HF_TOKEN"
        ) from error
    except Exception as error:  # the library's own, httpx's, requests' or the file system's, by its version
        cause = error.__cause__ or error
        reason = (" ".join(str(cause).split()) or type(cause).__name__).split(". ")[0]
        raise UsageError(f"{repo_id} cannot be downloaded from {endpoint} ({reason}); check the network") from error
