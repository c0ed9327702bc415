"""Lists, downloads and deletes models in the hub client's cache: a program of its own.

    python hub_program.py list
    python hub_program.py download organisation/name
    python hub_program.py delete organisation/name

It prints one JSON object a line. The hub's client is slow to import and reads variables of its own,
so ``hub_cache`` starts it here instead; it may be run by another environment's Python, so it
imports nothing of ours.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

LOOK_S: Final = 0.5
# Weights in safetensors, tokenizers, templates and settings; the engines read nothing else.
WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class Refusal(Exception):
    """A verb cannot be carried out; the message says why."""


def list_models() -> Iterator[Mapping[str, Any]]:
    """Yield the models in the cache with their bytes, and the free bytes of its disk."""
    models = [
        {
            "id": x.repo_id,
            "folder": str(x.repo_path),
            "nbytes": _bytes_in(x.repo_path),
            "used_at": x.last_accessed,
        }
        for x in _repositories()
    ]
    models.sort(key=lambda x: -x["nbytes"])
    yield {"models": models, "free_bytes": _free_bytes()}


def download(name: str) -> Iterator[Mapping[str, Any]]:
    """Download a model; yield every ``LOOK_S`` how many bytes of it are here."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    about = HfApi().model_info(name, files_metadata=True)
    wanted = [x for x in about.siblings or () if any(fnmatch(x.rfilename, y) for y in WANTED)]
    if not any(x.rfilename.endswith(".safetensors") for x in wanted):
        raise Refusal(f"{name} has no weights in safetensors, which the engines read")
    total = sum(x.size or 0 for x in wanted)
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    blobs, names = folder / "blobs", {_blob_of(x) for x in wanted}
    # Parts of files that killed downloads have left. Newer clients begin such a file anew, so these
    # bytes do not count; older clients continue the part, which is named like the file.
    left = {x for x in blobs.glob("*.incomplete") if x.stem not in names}

    def num_here() -> int:
        found = (x for x in blobs.glob("*") if x.name.partition(".")[0] in names)
        return _bytes_of(x for x in found if x not in left)

    free = _free_bytes() + num_here()
    if total > free:
        raise Refusal(f"{name} needs {total / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(snapshot_download, name, revision=about.sha, allow_patterns=list(WANTED))
        while not job.done():
            yield {"done_bytes": min(total, num_here()), "total_bytes": total}
            wait([job], timeout=LOOK_S)
        job.result()
    yield {"done_bytes": total, "total_bytes": total}


def delete(name: str) -> Iterator[Mapping[str, Any]]:
    """Delete a model with all of its revisions and files of unfinished downloads.

    If the model's folder is a link, only the link is removed, since the files are not in the cache.
    """
    from huggingface_hub import scan_cache_dir

    found = [x for x in _repositories() if x.repo_id == name]
    if not found:
        raise Refusal(f"{name} is not in the cache")
    real = [x.repo_path.resolve() for x in found]
    nbytes = sum(map(_bytes_in, real))
    hashes = [y.commit_hash for x in found for y in x.revisions]
    if hashes:
        scan_cache_dir().delete_revisions(*hashes).execute()
    for folder in (x.repo_path for x in found):
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    yield {"freed_bytes": nbytes - sum(map(_bytes_in, real))}


def _repositories() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [x for x in scan_cache_dir().repos if x.repo_type == "model"]
    except CacheNotFound:
        return []


def _blob_of(file: Any) -> str:
    """Return the name under which the cache keeps a file of the hub."""
    return str(file.lfs.sha256 if file.lfs else file.blob_id)


def _bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder, those of unfinished downloads included."""
    return _bytes_of(folder.rglob("*"))


def _bytes_of(paths: Iterable[Path]) -> int:
    try:
        return sum(x.lstat().st_size for x in paths if not x.is_dir())
    except OSError:  # a file was renamed just now
        return 0


def _free_bytes() -> int:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return shutil.disk_usage(next(x for x in (folder, *folder.parents) if x.exists())).free


VERBS: Final[Mapping[str, Callable[..., Iterator[Mapping[str, Any]]]]] = {
    "list": list_models,
    "download": download,
    "delete": delete,
}


def _why(error: Exception, name: str = "") -> str:
    """Return a sentence with the reason of an error and a way out."""
    from huggingface_hub import constants, errors

    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, Refusal):
        return said
    if isinstance(error, errors.GatedRepoError):
        where = f"{constants.ENDPOINT}/{name}"
        return f"{name} is gated: accept its terms at {where}, and start the server with HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 404):
        return f"the hub shows no {name}: check the spelling; a private one needs HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set for this server: start it without"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refuses: {said}"
    number, folder = getattr(error, "errno", None), constants.HF_HUB_CACHE
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full: free some of it and download again: it continues"
    if getattr(error, "filename", None) or number in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "let it, or start it with another HF_HOME"
        return f"the server cannot write to {folder} ({said}): {hint}"
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore")):
        hint = "its network, the proxy in HTTPS_PROXY, or HF_ENDPOINT for a mirror"
        return f"{constants.ENDPOINT} cannot be reached from this machine ({said}); check {hint}"
    return said


def main(verb: str, *names: str) -> int:
    """Print what a verb yields, or a line with the reason of an error; return the exit code."""
    try:
        for said in VERBS[verb](*names):
            print(json.dumps(said), flush=True)
    except BrokenPipeError:  # the reader has gone: end the download, too
        os._exit(1)
    except ImportError:
        why = "the server's Python has no huggingface_hub"
    except Exception as error:  # of the network, the hub, the disk
        why = _why(error, *names)
    else:
        return 0
    print(json.dumps({"problem": why}), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
