"""A checkpoint on disk (or in an object store) as weights to publish: mapped, and read as it is copied."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from weightdepot.store.checkpoint import checkpoint_index, checkpoint_tensors
from weightdepot.store.errors import IntegrityError, InvalidRequest
from weightdepot.store.files import MANIFEST, digest_of, filesystem, is_remote, local_path, read_manifest


@contextlib.contextmanager
def checkpoint_weights(source: str, *, verify: bool = True) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint: a directory of safetensors files, or a URL of one that was exported, which
    is brought to the local disk first. They are mapped, and can be used inside the block only.

    verify: compare the files with the digests of the manifest, where the checkpoint has one.

    Raises InvalidRequest for what is no checkpoint, IntegrityError naming the files that changed.
    """
    with contextlib.ExitStack() as stack:
        if is_remote(source):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightdepot-import-")))
            _download(source, folder)
        else:
            folder = local_path(source)
        specs = checkpoint_tensors(folder)
        if verify:
            verify_files(folder)
        index = checkpoint_index(folder)
        files = sorted(set(index.values())) if index else sorted(p.name for p in folder.glob("*.safetensors"))
        found: dict[str, torch.Tensor] = {}
        for file in files:
            opened = stack.enter_context(safe_open(folder / file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                if index.get(name, file) == file:
                    found[name] = opened.get_tensor(name)
        yield {spec.name: found[spec.name] for spec in specs}


def verify_files(folder: Path) -> int:
    """Compares the files with the manifest's digests; how many it names (0: there is no manifest).

    Raises IntegrityError naming those that differ.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return 0
    manifest = read_manifest(path.read_bytes(), str(path))
    wrong = [
        name
        for name, entry in manifest.files.items()
        if not (folder / name).is_file() or digest_of(folder / name) != entry
    ]
    if wrong:
        raise IntegrityError(
            f"{len(wrong)} file(s) in {folder} are not what was exported as version {manifest.version} of "
            f"{manifest.model!r}: {', '.join(wrong[:8])}; export it again, or take another version",
            model=manifest.model,
            version=manifest.version,
            files=wrong[:100],
        )
    return len(manifest.files)


def manifest_version(source: str) -> int | None:
    """The version that a checkpoint was exported from; None where it has no manifest."""
    if is_remote(source):
        fs, root = filesystem(source)
        path = f"{root}/{MANIFEST}"
        return read_manifest(fs.cat_file(path), source).version if fs.exists(path) else None
    file = local_path(source) / MANIFEST
    return read_manifest(file.read_bytes(), str(file)).version if file.is_file() else None


def _download(source: str, folder: Path) -> None:
    fs, root = filesystem(source)
    try:
        if not fs.exists(f"{root}/{MANIFEST}"):
            raise InvalidRequest(f"{source} holds no whole checkpoint: it has no {MANIFEST}")
        sizes = {str(path): int(entry["size"] or 0) for path, entry in fs.find(root, detail=True).items()}
        free = shutil.disk_usage(folder).free
        if sum(sizes.values()) > free:
            raise InvalidRequest(
                f"{source} takes {sum(sizes.values())} bytes, and {folder} has {free} free: set TMPDIR"
            )
        for path in sizes:
            fs.get_file(path, str(folder / path.rsplit("/", 1)[-1]))
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error}") from error
