"""Which version computed what: generations, and the gate that holds them until the weights are fresh."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightdepot import Producer
from weightdepot.api.client import ControllerClient
from weightdepot.consumers.generation import Generation, Serving
from weightdepot.store.errors import StaleGroup, WaitTimeout

from .fleet import publish, ranks


def test_case_12_a_generation_has_the_version_that_it_began_with_and_the_one_that_it_ended_with(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        with pytest.raises(StaleGroup, match="no version was applied"), consumer.generation():
            pass
        publish(producer, 1)
        consumer.update()
        with consumer.generation() as long:
            with consumer.generation() as short:
                pass
            ends = [long.end]
            publish(producer, 2, 3)
            consumer.update(version=2)
            consumer.update()
        assert ends == [None]
        assert (short.start, short.end, short.versions) == (1, 1, (1,))
        assert (long.start, long.end, long.versions) == (1, 3, (1, 2, 3))
        with consumer.generation() as g, ControllerClient(controller) as client:
            client.hold(model, 2)
            consumer.update()
            client.release(model)
            consumer.update()
        assert g.versions == (3, 2, 3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("serve"), st.integers(0, 3)),
            st.tuples(st.just("stop"), st.just(0)),
            st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 2)),
        ),
        max_size=30,
    )
)
def test_every_generation_lists_what_served_in_its_time_and_refuses_what_was_torn(
    steps: list[tuple[str, int]],
) -> None:
    """Against the plainest model: all that ever served, in a list."""
    serving = Serving("m", "g")
    history: list[int | None] = [None]
    open_: dict[int, tuple[Generation, int]] = {}
    for what, number in steps:
        if what == "serve":
            serving.serve(number)
            history.append(number)
        elif what == "stop":
            serving.stop("it broke")
            history.append(None)
        elif what == "begin" and number not in open_:
            generation = Generation(serving)
            if history[-1] is None:
                with pytest.raises(StaleGroup):
                    generation.__enter__()
            else:
                generation.__enter__()
                open_[number] = generation, len(history) - 1
        elif what == "end" and number in open_:
            generation, first = open_.pop(number)
            during = history[first:]
            if None in during:
                with pytest.raises(StaleGroup):
                    generation.__exit__(None, None, None)
                assert generation.end is None
            else:
                generation.__exit__(None, None, None)
                changes = [v for i, v in enumerate(during) if i == 0 or during[i - 1] != v]
                assert generation.versions == tuple(changes)
                assert (generation.start, generation.end) == (during[0], during[-1])


def test_the_error_of_what_was_generated_is_not_hidden_by_torn_weights() -> None:
    serving = Serving("m", "g")
    serving.serve(1)
    generation = Generation(serving)
    with pytest.raises(KeyError), generation:  # noqa: PT012  both must happen inside
        serving.stop("it broke")
        raise KeyError("mine")
    assert generation.end is None


def test_a_gate_lets_rollouts_in_when_their_weights_are_fresh_enough(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        with pytest.raises(WaitTimeout, match="it holds no version"):
            consumer.gate(5, timeout=0.2)
        publish(producer, 1)
        consumer.update()
        assert consumer.gate(0) == 1
        publish(producer, 2, 3)
        assert consumer.gate(2) == 1
        with pytest.raises(WaitTimeout, match="it holds version 1, 2 behind") as caught:
            consumer.gate(1, timeout=0.2)
        assert (caught.value.details["version"], caught.value.details["lag"]) == (1, 2)
        entered: list[int] = []
        waits = threading.Thread(target=lambda: entered.append(consumer.gate(1, timeout=20)))
        waits.start()
        assert consumer.update() == 3
        waits.join(20)
        assert entered == [3]


def test_a_gate_is_open_while_the_next_version_is_read_in_the_background(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        consumer.update()
        staged = consumer.prefetch()
        publish(producer, 2)
        assert staged.result(20) == 2
        assert consumer.gate(1, timeout=5) == 1
        with pytest.raises(WaitTimeout, match="1 behind"):
            consumer.gate(0, timeout=0.2)
        consumer.apply()
        assert consumer.gate(0, timeout=5) == 2
