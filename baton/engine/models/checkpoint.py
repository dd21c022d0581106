"""Turns the model setting into a checkpoint folder, and chooses the dtype.

Owns: telling a folder from a Hugging Face hub id, fetching only the files that are used, choosing the dtype. Does not
open the files: `baton/engine/models/config.py` and `weights.py` do. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from baton.engine.models.facts import ModelFacts
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.layout import FP8_E4M3

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes a model can be computed in."""
_KV_DTYPES = {"auto": "", "fp8": FP8_E4M3, FP8_E4M3: FP8_E4M3}
"""By the values of `--kv-cache-dtype`; "": that of the model."""

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "*.model",
)
# Not *.safetensors: some repositories hold the same weights once more in another layout.
_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")


def resolve_checkpoint(model: str, weights: bool = True) -> Path:
    """The folder of `model`, which may be a folder, a GGUF file or a hub id. Raises `ModelLoadError`.

    A GGUF file gets a folder that is made of it. Of a hub id, the snapshot is downloaded as far as the local cache
    lacks it; a download that was interrupted goes on. `owner/name@revision` is a branch, a tag or a commit of it.
    Without `weights` only config and tokenizer files are fetched. Offline, the cache must have it.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix != ".gguf":
            raise ModelLoadError(f"model {model!r} is a file, expected a checkpoint folder, a .gguf file or a hub id")
        # imported late: its blocks are read with numpy, which routers do without
        from baton.engine.models.gguf.folder import checkpoint_folder

        return checkpoint_folder(folder)
    return _hub_snapshot(model, [*_TEXT_FILES, *(_WEIGHT_FILES if weights else ())])


def choose_dtype(setting: str, config: ModelFacts) -> str:
    """The dtype to compute in, by name. `auto` is the checkpoint's own, float32 when it does not say. Raises
    `InvalidSetting` for an unknown setting, `ModelLoadError` when the checkpoint's own dtype cannot be computed in."""
    if setting in DTYPES:
        return setting
    if setting != "auto":
        raise InvalidSetting(f"dtype {setting!r} is not known; allowed: auto, {', '.join(DTYPES)}")
    if config.dtype is None:
        return "float32"
    if config.dtype not in DTYPES:
        raise ModelLoadError(
            f"config.json: dtype {config.dtype!r} cannot be computed in; set dtype to one of {', '.join(DTYPES)}"
        )
    return config.dtype


def choose_kv_dtype(setting: str, dtype: str) -> str:
    """The dtype of the KV of a model that is computed in `dtype`, by name. Raises `InvalidSetting`."""
    if setting not in _KV_DTYPES:
        raise InvalidSetting(f"KV cache dtype {setting!r:.50} is not known; allowed: {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES[setting] or dtype


def _hub_snapshot(model: str, patterns: list[str]) -> Path:
    # Imported late: a local folder must not pay for the hub client's start.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    from baton.engine.models.download_progress import progress_class

    name, _, revision = model.partition("@")
    folder = Path(model).expanduser().absolute()
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns, tqdm_class=progress_class())
        )
    except HFValidationError:
        raise ModelLoadError(
            f"model {model!r} is neither a folder ({folder} is not there) nor a valid hub id (name or owner/name)"
        ) from None
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"model {model!r} is not a folder ({folder} is not there), and the hub has no such model that these "
            "credentials may read (`hf auth login`)"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error).strip().partition("\n")[0]
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ModelLoadError(
            f"model {model!r} is not a folder ({folder} is not there), is not in the local hub cache "
            f"({constants.HF_HUB_CACHE}) and cannot be downloaded: {reason}; where there is a network, `{command}` "
            "fetches it"
        ) from error
