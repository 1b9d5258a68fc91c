"""A version as a checkpoint and back: bit-equal, whole or not there, resumed after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import weightdepot
from weightdepot.api.client import ControllerClient
from weightdepot.consumers.files.export import Exported, export
from weightdepot.consumers.files.follow import existing, follow
from weightdepot.consumers.files.places import Folder, place_for
from weightdepot.store.errors import IntegrityError, VersionGone
from weightdepot.store.files import MANIFEST

Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    torch.manual_seed(0)
    found: Tensors = {f"layer.{i}.weight": torch.randn(64, 48).bfloat16() for i in range(6)}
    return {**found, "steps": torch.arange(7), "mask": torch.tensor([True, False, True])}


def loaded(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test: they share a controller."""
    return str(request.node.name)[:60]


@pytest.fixture
def trainer(controller: str, model: str) -> Iterator[tuple[weightdepot.Producer, Tensors]]:
    held = weights()
    with weightdepot.Producer(controller, model=model, weights=held) as producer:
        yield producer, held


def command(controller: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weightdepot.cli", *words, "--controller", controller],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_exported_version_is_bit_equal_and_says_what_it_is(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], tmp_path: Path
) -> None:
    producer, held = trainer
    producer.publish(120, wait="ready")
    described = tmp_path / "base"
    described.mkdir()
    (described / "config.json").write_text("{}")
    (described / "model.safetensors").write_text("not copied")
    with ControllerClient(controller) as client:
        place = place_for(str(tmp_path / "out"))
        done = export(client, model, place, description=described, largest=8000)
        assert client.groups(model) == ()  # the export has left no group behind
    assert (done.version, done.resumed) == (120, 0)
    assert done.files > 1
    assert same(loaded(tmp_path / "out"), held)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / MANIFEST).is_file()


def test_transformers_loads_what_was_exported(controller: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config).bfloat16()
    config.save_pretrained(tmp_path / "base")
    with weightdepot.Producer(controller, model="hf", weights=module) as producer:
        producer.publish(1, wait="ready")
        with ControllerClient(controller) as client:
            export(
                client, "hf", place_for(str(tmp_path / "out")), description=tmp_path / "base", largest=9000
            )
    read = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert same(dict(read.state_dict()), dict(module.state_dict()))


def test_an_export_that_is_killed_goes_on_where_it_was(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], tmp_path: Path
) -> None:
    producer, held = trainer
    producer.publish(1, wait="ready")
    script = (
        "import os, signal, sys\n"
        "from weightdepot.api.client import ControllerClient\n"
        "from weightdepot.consumers.files import export as module\n"
        "from weightdepot.consumers.files.places import place_for\n"
        "fill, calls = module._fill, []\n"
        "def halting(*arguments):\n"
        "    calls.append(1)\n"
        "    fill(*arguments)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "module._fill = halting\n"
        "with ControllerClient(sys.argv[1]) as client:\n"
        "    module.export(client, sys.argv[3], place_for(sys.argv[2]), largest=7000)\n"
    )
    target = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", script, controller, str(target), model], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    with ControllerClient(controller) as client:
        done = export(client, model, Folder(target), largest=7000)
    assert done.resumed == 2
    assert same(loaded(target), held)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_version_that_is_gone_is_an_error_and_leaves_nothing(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], tmp_path: Path
) -> None:
    producer, _ = trainer
    for version in range(4):
        producer.publish(version, wait="ready")
    with ControllerClient(controller) as client, pytest.raises(VersionGone, match="version 0 of"):
        export(client, model, place_for(str(tmp_path / "out")), version=0)
    assert list(tmp_path.iterdir()) == []


def test_every_nth_version_is_exported_and_the_newest_are_kept(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], tmp_path: Path
) -> None:
    producer, _ = trainer
    seen: list[int] = []
    pending = iter(range(9))

    def publish_two() -> None:
        for version in pending:
            producer.publish(version, wait="ready")
            if version % 2 == 0:
                return

    def note(done: Exported) -> None:
        seen.append(done.version)
        publish_two()

    publish_two()
    with ControllerClient(controller) as client:
        follow(
            client, model, str(tmp_path), every=2, keep=2, stop=lambda: len(seen) == 5,
            on_exported=note,
        )  # fmt: skip
    assert seen == [0, 2, 4, 6, 8]
    assert sorted(existing(str(tmp_path))) == [6, 8]


def test_an_imported_checkpoint_is_served_until_a_trainer_takes_over(
    controller: str, model: str, tmp_path: Path
) -> None:
    held = weights()
    save_file(held, tmp_path / "model.safetensors")
    importer = command(controller, "import", str(tmp_path), model, "--version", "7")
    try:
        assert importer.stdout is not None
        assert f"version 7 of {model} is ready" in importer.stdout.readline()
        got = {name: torch.zeros_like(t) for name, t in held.items()}
        with weightdepot.Consumer(controller, model=model, weights=got) as consumer:
            assert consumer.update(timeout=30) == 7
            assert same(got, held)
            # a trainer of another number of ranks
            new = {name: torch.ones_like(t) for name, t in held.items()}
            halves = [
                weightdepot.Producer(controller, model=model, weights=part, rank=rank, world_size=2)
                for rank, part in enumerate((dict(list(new.items())[:4]), dict(list(new.items())[4:])))
            ]
            assert consumer.update(timeout=30) == 7  # it is there still
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(2) as pool:
                for version in (8, 9, 10):
                    list(pool.map(lambda p, v=version: p.publish(v, wait="ready"), halves))
                    assert consumer.update(min_version=version, timeout=30) == version
            assert same(got, new)
            assert importer.wait(30) == 0  # its version has been replaced
            for producer in halves:
                producer.close()
    finally:
        importer.kill()
        importer.communicate()


def test_a_checkpoint_that_changed_since_its_export_is_refused_by_name(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], tmp_path: Path
) -> None:
    producer, _ = trainer
    producer.publish(3, wait="ready")
    with ControllerClient(controller) as client:
        export(client, model, place_for(str(tmp_path / "out")))
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    from weightdepot.producers.checkpoint import checkpoint_weights

    with (
        pytest.raises(IntegrityError, match=r"model\.safetensors"),
        checkpoint_weights(str(tmp_path / "out")),
    ):
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real S3 server on the loopback interface (moto's)."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    import fsspec

    fsspec.filesystem("s3").mkdir("depot")
    yield "s3://depot/run-1"
    fsspec.filesystem("s3").clear_instance_cache()
    running.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_to_an_object_store_and_back(
    controller: str, model: str, trainer: tuple[weightdepot.Producer, Tensors], bucket: str
) -> None:
    producer, held = trainer
    producer.publish(11, wait="ready")
    with ControllerClient(controller) as client:
        done = export(client, model, place_for(f"{bucket}/00000011"), largest=8000)
    assert done.files > 1
    assert list(existing(bucket)) == [11]
    from weightdepot.producers.checkpoint import checkpoint_weights, manifest_version

    assert manifest_version(f"{bucket}/00000011") == 11
    with checkpoint_weights(f"{bucket}/00000011") as read:
        assert same(read, held)


def test_a_resumed_import_after_a_total_loss_has_its_number_again(controller: str, tmp_path: Path) -> None:
    held = weights()
    with weightdepot.Producer(controller, model="lost", weights=held) as producer:
        producer.publish(40, wait="ready")
        with ControllerClient(controller) as client:
            export(client, "lost", place_for(str(tmp_path / "out")))
    importer = command(controller, "import", str(tmp_path / "out"), "again")
    try:
        assert importer.stdout is not None
        assert "version 40 of again is ready" in importer.stdout.readline()
        importer.send_signal(signal.SIGTERM)
        assert importer.wait(20) == 0
        deadline = time.monotonic() + 10
        with ControllerClient(controller) as client:
            while client.version("again", 40).state.value != "freed":
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        importer.kill()
        importer.communicate()
