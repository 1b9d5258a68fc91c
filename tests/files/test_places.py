"""A checkpoint is whole under its name or not there, on a disk and in an object store."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightdepot.consumers.files.places import ExportFailed, Folder, Identity, place_for
from weightdepot.consumers.files.shards import ShardFile, shard_files
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.files import MANIFEST, digest_of, read_manifest
from weightdepot.store.layout import TensorSpec

ME = Identity("policy", 7, "a")
FILES = shard_files([TensorSpec(f"t{i}", (64,), "float32") for i in range(3)], 256)
SIZES = {file.name: file.nbytes for file in FILES}


def write(path: Path, file: ShardFile, value: int) -> None:
    path.write_bytes(file.header + bytes([value]) * (file.nbytes - len(file.header)))


def fill(folder: Folder, files: tuple[ShardFile, ...] = FILES, value: int = 1) -> None:
    for file in files:
        with folder.file(file) as path:
            write(path, file, value)


def test_nothing_is_under_the_name_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "out"
    folder = Folder(target)
    assert folder.begin(ME, SIZES) == set()
    fill(folder)
    assert not target.exists()
    folder.finish({"config.json": b"{}"})
    assert sorted(p.name for p in target.iterdir()) == sorted([*SIZES, "config.json", MANIFEST])
    manifest = read_manifest((target / MANIFEST).read_bytes(), "it")
    assert (manifest.model, manifest.version) == ("policy", 7)
    assert all(digest_of(target / name) == entry for name, entry in manifest.files.items())
    assert list(tmp_path.iterdir()) == [target]


def test_a_second_attempt_at_the_same_keeps_the_files_that_are_whole(tmp_path: Path) -> None:
    first = Folder(tmp_path / "out")
    first.begin(ME, SIZES)
    fill(first, FILES[:2])
    third = first.file(FILES[2])
    write(third.__enter__(), FILES[2], 9)  # and killed here
    again = Folder(tmp_path / "out")
    assert again.begin(ME, SIZES) == {FILES[0].name, FILES[1].name}


def test_a_file_that_changed_meanwhile_is_written_anew(tmp_path: Path) -> None:
    first = Folder(tmp_path / "out")
    first.begin(ME, SIZES)
    fill(first, FILES[:2])
    write(tmp_path / ".out.partial" / FILES[0].name, FILES[0], 5)
    assert Folder(tmp_path / "out").begin(ME, SIZES) == {FILES[1].name}


def test_files_of_another_attempt_at_the_version_are_not_kept(tmp_path: Path) -> None:
    first = Folder(tmp_path / "out")
    first.begin(ME, SIZES)
    fill(first, FILES[:2])
    assert Folder(tmp_path / "out").begin(Identity("policy", 7, "b"), SIZES) == set()


def test_what_is_there_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("x")
    with pytest.raises(InvalidRequest, match="--overwrite"):
        Folder(target).begin(ME, SIZES)
    folder = Folder(target, overwrite=True)
    folder.begin(ME, SIZES)
    assert (target / "old").exists()
    fill(folder)
    folder.finish({})
    assert not (target / "old").exists()
    assert (target / MANIFEST).is_file()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_found_before_anything_is_read_and_leaves_nothing(small_disk: Path) -> None:
    big = shard_files([TensorSpec("t", (1 << 20,), "float32")])
    with pytest.raises(ExportFailed, match="is full"):
        Folder(small_disk / "out").begin(ME, {f.name: f.nbytes for f in big})
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_in_the_middle_leaves_nothing(small_disk: Path) -> None:
    folder = Folder(small_disk / "out")
    files = shard_files([TensorSpec(f"t{i}", (20_000,), "float32") for i in range(2)], 1)
    folder.begin(ME, {f.name: f.nbytes for f in files})
    with folder.file(files[0]) as path:
        write(path, files[0], 1)
    (small_disk / "somebody-else").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    with pytest.raises(ExportFailed, match="is full"), folder.file(files[1]):
        pass
    assert [p.name for p in small_disk.iterdir()] == ["somebody-else"]


def test_an_unknown_kind_of_place_is_said() -> None:
    with pytest.raises(InvalidRequest, match="cannot be reached"):
        place_for("nowhere://x/y")
