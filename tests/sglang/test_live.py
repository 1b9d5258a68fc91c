"""A live model follows versions that are really published; what needs SGLang's kernels is not run here.

The model, its loader, its weight updater and the methods of its scheduler are SGLang's own. Not there are the
event loop, a forward pass and process groups, so that this does not show that an engine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, RpcReqInput, RpcReqOutput
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader

from weightdepot import Producer, Timeouts
from weightdepot.consumers.sglang import needs, plugin
from weightdepot.consumers.sglang.live import EngineRank, LiveModel
from weightdepot.consumers.sglang.ranks import rank_context
from weightdepot.consumers.sglang.scheduler import Outcome, judge
from weightdepot.consumers.sglang.shadow import engine_arguments, shadow_of
from weightdepot.consumers.staging import Placing
from weightdepot.store.checkpoint import checkpoint_tensors
from weightdepot.store.errors import InvalidRequest, LayoutError, WeightDepotError

from ..filling import different, tensors_of, weights_of
from ..system.harness import together

QUICK = Timeouts(join=20, publish=20, seal=20, update=20, call=10)
SHORT: dict[str, Any] = {"timeouts": QUICK}
BOUNDED: dict[str, Any] = {"timeout_join": 20, "timeout_update": 20}


def runner_of(arguments: Any) -> Any:
    """What the adapter uses of a model runner, with SGLang's own updater; loaded as an engine starts."""
    config = ModelConfig.from_server_args(arguments)
    model = shadow_of(config, "cpu")
    load(model, weights_of(Path(arguments.model_path)))
    runner = SimpleNamespace(model=model, model_config=config, device="cpu")
    runner.weight_updater = WeightUpdater(
        tp_rank=runtime_context.get_parallel().tp_rank,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: runner.model,
        update_model_fields=lambda: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    return runner


def load(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    given = ((name, w.clone()) for name, w in sorted(weights.items()))
    DefaultModelLoader.load_weights_and_postprocess(model, given, torch.device("cpu"))


def changed(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {n: torch.randn(w.shape, generator=generator).to(w.dtype) for n, w in weights.items()}


def publish(producer: Producer, weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    new = changed(weights, version)
    for name, tensor in weights.items():
        tensor.copy_(new[name])
    producer.publish(version, wait="ready")
    return new


def loaded_afresh(runner: Any, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """What an engine that is started from these weights has."""
    model = shadow_of(runner.model_config, "cpu")
    load(model, weights)
    return model


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gemma3"])
def test_both_ranks_of_an_engine_follow_two_versions_bit_for_bit(
    controller: str, model_of: Callable[[str], Path], name: str
) -> None:
    arguments = engine_arguments(model_of(name), 2)
    weights = weights_of(model_of(name))
    model = f"sglang-{name}"
    with ExitStack() as stack:
        producer = stack.enter_context(Producer(controller, model=model, weights=weights, timeouts=QUICK))
        members, runners = [], []
        for rank in (0, 1):
            with rank_context(arguments, rank), torch.inference_mode():  # as schedulers work
                runners.append(runner_of(arguments))
                members.append(EngineRank(runners[rank], controller, model=model, **SHORT))
                stack.enter_context(members[rank])
                members[rank].prepare(10)
                assert members[rank].version is None
        for version in (1, 2):
            new = publish(producer, weights, version)
            prefetched = [m.prefetch() for m in members] if version == 2 else []
            assert [f.result(20) for f in prefetched if f] == [version] * len(prefetched)
            updates = [partial(m.update, version=version) for m in members]
            assert together(*updates) == [version, version]
            for rank in (0, 1):
                assert members[rank].version == version
                assert members[rank].torn == ""
                with rank_context(arguments, rank):
                    assert different(runners[rank].model, loaded_afresh(runners[rank], new)) == ()


def test_when_one_rank_fails_all_ranks_refuse_until_an_update_succeeds(
    controller: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = engine_arguments(model_of("llama"), 2)
    weights = weights_of(model_of("llama"))
    with ExitStack() as stack:
        producer = stack.enter_context(Producer(controller, model="sglang-half", weights=weights, **SHORT))
        members, runners = [], []
        for rank in (0, 1):
            with rank_context(arguments, rank):
                runners.append(runner_of(arguments))
                members.append(EngineRank(runners[rank], controller, model="sglang-half", **SHORT))
                stack.enter_context(members[rank]).prepare(10)
        publish(producer, weights, 1)

        def outcome(member: EngineRank) -> Outcome:
            error = ""
            try:
                member.update(timeout=10)
            except (WeightDepotError, OSError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            return Outcome(member.consumer.rank, member.version, member.torn, error)

        with monkeypatch.context() as patch:
            patch.setattr(runners[1].weight_updater.__class__, "begin_weight_update", _second_breaks)
            outcomes = together(*[partial(outcome, m) for m in members])
        assert outcomes[1].torn == outcomes[1].error == "OSError: the device is gone"
        assert outcomes[0].error.startswith("StaleGroup")
        assert "rank 1: OSError" in judge(outcomes)
        new = publish(producer, weights, 2)
        assert judge(together(*[partial(outcome, m) for m in members])) == ""
        for rank in (0, 1):
            with rank_context(arguments, rank):
                assert different(runners[rank].model, loaded_afresh(runners[rank], new)) == ()


def _second_breaks(updater: WeightUpdater) -> None:
    if updater.tp_rank == 1:
        raise OSError("the device is gone")


class Scheduler(sglang_scheduler.Scheduler):  # type: ignore[misc]
    """SGLang's own methods, without an event loop, batches or caches."""

    def __init__(self, runner: Any) -> None:
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.tp_group = SimpleNamespace(cpu_group=None)
        self.disaggregation_mode = None
        self.hisparse_coordinator = self.chunked_req = self._pause_started_at = None
        self.waiting_queue: list[Any] = []
        self._pause_intervals: list[Any] = []
        self._engine_paused = False
        self.idle, self.flushed = True, 0

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        return self.idle

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.flushed += 1
        return True

    def _collect_inflight_batches(self) -> list[Any]:
        return []

    def call(self, method: str, **parameters: Any) -> None:
        """As `Engine.collective_rpc`."""
        sent = msgspec.msgpack.encode(RpcReqInput(method=method, parameters=parameters))
        answer: RpcReqOutput = self.handle_rpc_request(msgspec.msgpack.decode(sent, type=RpcReqInput))
        if not answer.success:
            raise RuntimeError(answer.message)


@pytest.fixture
def engine(model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    plugin.register()
    monkeypatch.setattr(sglang_scheduler, "barrier", lambda group: None)
    arguments = engine_arguments(model_of("qwen3_moe"))
    with rank_context(arguments, 0), torch.inference_mode():
        scheduler = Scheduler(runner_of(arguments))
        yield scheduler
        scheduler.call("weightdepot_leave")


@pytest.fixture
def trainer(
    controller: str, model_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[tuple[Producer, dict[str, torch.Tensor]]]:
    weights = weights_of(model_of("qwen3_moe"))
    name = request.node.name.replace("_", "-")[:60]
    with Producer(controller, model=name, weights=weights, timeouts=QUICK) as producer:
        yield producer, weights


Trainer = tuple[Producer, dict[str, torch.Tensor]]


def test_an_update_flushes_the_caches_and_becomes_sglangs_weight_version(
    controller: str, engine: Scheduler, trainer: Trainer
) -> None:
    producer, weights = trainer
    engine.call("weightdepot_join", controller=controller, model=producer.model, **BOUNDED)
    for version in (1, 2):
        new = publish(producer, weights, version)
        engine.call("weightdepot_update", version=version)
        assert (
            different(engine.tp_worker.model_runner.model, loaded_afresh(engine.tp_worker.model_runner, new))
            == ()
        )
        assert runtime_context.get_serving().weight_version == str(version)
        assert engine.flushed == version
    engine.call("weightdepot_update")  # nothing newer
    assert engine.flushed == 2
    engine.call("weightdepot_update", version=1)  # an older one
    assert runtime_context.get_serving().weight_version == "1"
    engine.call("weightdepot_update", max_lag=1)
    assert engine.flushed == 3


def test_an_engine_whose_caches_were_not_flushed_does_not_serve(
    controller: str, engine: Scheduler, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, weights = trainer
    engine.call("weightdepot_join", controller=controller, model=producer.model, prefetch=False, **BOUNDED)
    publish(producer, weights, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "flush_cache", lambda self, empty_cache=True: False)
        with pytest.raises(RuntimeError, match=r"did not flush.*stays paused"):
            engine.call("weightdepot_update")
    assert engine._engine_paused
    engine.call("weightdepot_update")
    assert not engine._engine_paused
    assert engine.flushed == 1
    assert runtime_context.get_serving().weight_version == "1"


def test_an_update_away_from_a_safe_point_is_refused_and_changes_nothing(
    controller: str, engine: Scheduler, trainer: Trainer
) -> None:
    producer, weights = trainer
    engine.call("weightdepot_join", controller=controller, model=producer.model, **BOUNDED)
    publish(producer, weights, 1)
    before = {n: t.clone() for n, t in tensors_of(engine.tp_worker.model_runner.model).items()}
    engine.idle = False
    for options in ({}, {"flush_cache": False}):
        with pytest.raises(RuntimeError, match="requests are running"):
            engine.call("weightdepot_update", **options)
    now = tensors_of(engine.tp_worker.model_runner.model)
    assert all(torch.equal(now[n], t) for n, t in before.items())
    assert engine.flushed == 0
    engine._engine_paused = True  # in place: the old key-value cache is kept
    engine.call("weightdepot_update", flush_cache=False)
    assert runtime_context.get_serving().weight_version == "1"
    assert engine.flushed == 0


def test_an_update_that_fails_while_it_writes_pauses_the_engine_until_one_succeeds(
    controller: str, engine: Scheduler, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, weights = trainer
    engine.call("weightdepot_join", controller=controller, model=producer.model, prefetch=False, **BOUNDED)
    publish(producer, weights, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Placing, "__call__", _breaks)
        with pytest.raises(RuntimeError, match=r"rank 0: OSError: the device is gone.*stays paused"):
            engine.call("weightdepot_update")
    assert engine._engine_paused
    engine.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    assert engine._engine_paused
    new = publish(producer, weights, 2)
    engine.call("weightdepot_update")
    assert not engine._engine_paused
    assert (
        different(engine.tp_worker.model_runner.model, loaded_afresh(engine.tp_worker.model_runner, new))
        == ()
    )


def _breaks(*_: object) -> None:
    raise OSError("the device is gone")


def test_a_version_that_does_not_come_leaves_the_engine_serving(
    controller: str, engine: Scheduler, trainer: Trainer
) -> None:
    producer, _ = trainer
    engine.call("weightdepot_join", controller=controller, model=producer.model, prefetch=False, **BOUNDED)
    with pytest.raises(RuntimeError, match="WaitTimeout"):
        engine.call("weightdepot_update", min_version=5, timeout=0.3)
    assert not engine._engine_paused
    assert runtime_context.get_serving().weight_version == "default"


def test_an_unknown_option_of_joining_is_refused(controller: str, engine: Scheduler) -> None:
    with pytest.raises(RuntimeError, match=r"weightdepot_join: .*soon"):
        engine.call("weightdepot_join", controller=controller, model="any", timeout_soon=1)


def test_calls_before_joining_say_so(engine: Scheduler) -> None:
    with pytest.raises(RuntimeError, match="has not joined"):
        engine.call("weightdepot_update")


def test_a_live_model_in_another_form_is_refused_by_name(model_of: Callable[[str], Path]) -> None:
    arguments = engine_arguments(model_of("qwen3_moe"))
    tensors = checkpoint_tensors(model_of("qwen3_moe"))
    with rank_context(arguments, 0):
        runner = runner_of(arguments)
        norm, proj = runner.model.model.norm, runner.model.model.layers[0].self_attn.o_proj
        proj.weight.data = proj.weight.data.t().contiguous().t()  # as kernels like it
        del norm.weight
        with pytest.raises(LayoutError) as caught:
            LiveModel(runner).trace(tensors)
    assert "model.norm.weight" in str(caught.value)
    assert "model.layers.0.self_attn.o_proj.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "what"), [({"pipeline": 2}, "pipeline"), ({"dp_size": 2}, "data parallelism")]
)
def test_engines_that_cannot_be_updated_at_one_point_are_refused(
    controller: str, model_of: Callable[[str], Path], options: dict[str, int], what: str
) -> None:
    arguments = engine_arguments(model_of("llama"), **options)
    with rank_context(arguments, 0), pytest.raises(InvalidRequest, match=what):
        EngineRank(SimpleNamespace(), controller, model="sglang-refused")


def test_a_shared_weight_cache_is_refused_with_sglangs_reason(
    controller: str, model_of: Callable[[str], Path]
) -> None:
    arguments = engine_arguments(model_of("llama"))
    with rank_context(arguments, 0), runtime_context.get_model().override(weight_cache_mode="client"):
        runner = runner_of(arguments)
        with pytest.raises(InvalidRequest, match="weight cache"):
            EngineRank(runner, controller, model="sglang-refused")


def test_this_sglang_has_what_the_adapter_needs_and_another_is_refused_by_name() -> None:
    needs.check()
    with pytest.raises(InvalidRequest, match=r"no sglang\.srt\.runtime_context:gone"):
        needs.check(["sglang.srt.runtime_context:gone"])


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([Outcome(0, 3), Outcome(1, 3)], ""),
        ([Outcome(0, None), Outcome(1, None)], ""),
        ([Outcome(0, 3, error="x"), Outcome(1, 3)], ""),
        ([Outcome(0, 3), Outcome(1, 2)], "rank 0 has version 3; rank 1 has version 2"),
        ([Outcome(0, 3), Outcome(1, None)], "rank 1 has its first weights"),
        ([Outcome(0, 3), Outcome(1, None, "half")], "rank 1: half"),
    ],
)
def test_an_engine_serves_only_when_all_ranks_hold_the_same_whole_weights(
    outcomes: list[Outcome], reason: str
) -> None:
    assert reason in judge(outcomes)
    assert bool(judge(outcomes)) == bool(reason)
