"""Which tensor lies in which file: any reader of safetensors agrees."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from weightdepot.consumers.files.shards import index_of, shard_files
from weightdepot.store.checkpoint import SAFETENSORS_NAMES
from weightdepot.store.dtypes import ITEMSIZE, torch_dtype
from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.layout import TensorSpec

DTYPES = ("float32", "bfloat16", "int64", "uint8", "float8_e4m3fn", "bool")


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    count = draw(st.integers(1, 12))
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return [TensorSpec(f"t{i}.weight", draw(shapes), draw(st.sampled_from(DTYPES))) for i in range(count)]


@given(tensors=specs(), largest=st.integers(1, 400))
def test_every_tensor_is_in_one_file_where_its_header_says(tensors: list[TensorSpec], largest: int) -> None:
    files = shard_files(tensors, largest)
    seen = {}
    for file in files:
        content = bytearray(file.nbytes)
        content[: len(file.header)] = file.header
        for placed in file.tensors:
            assert placed.start % ITEMSIZE[placed.spec.dtype] == 0
        read = load(bytes(content))
        assert set(read) == {placed.spec.name for placed in file.tensors}
        for placed in file.tensors:
            t = read[placed.spec.name]
            assert tuple(t.shape) == placed.spec.shape
            assert t.dtype == torch_dtype(placed.spec.dtype)
        seen.update(dict.fromkeys(read, file.name))
        payload = sum(placed.nbytes for placed in file.tensors)
        assert payload <= largest or len(file.tensors) == 1 or payload == 0
    assert set(seen) == {t.name for t in tensors}
    index = json.loads(index_of(files))
    assert index["weight_map"] == seen
    assert index["metadata"]["total_size"] == sum(math.prod(t.shape) * ITEMSIZE[t.dtype] for t in tensors)


def test_what_the_format_has_no_name_for_is_named() -> None:
    assert "complex128" not in SAFETENSORS_NAMES
    with pytest.raises(LayoutError, match="odd: safetensors has no complex128"):
        shard_files([TensorSpec("odd", (2,), "complex128")])


def test_no_tensors_are_no_checkpoint() -> None:
    with pytest.raises(InvalidRequest, match="no tensors"):
        shard_files([])
