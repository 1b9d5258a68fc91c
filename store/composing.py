"""Two layouts in a row make one: from the checkpoint to whole local names, from those to a rank's shards.

What an exporter says is best found out about whole tensors (traced on meta); what a rank holds of them is
said by the framework's own placements. `compose` joins the two, so that neither needs to know of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import BufferSpec, Layout, LayoutBuilder, Placement, TensorSpec
from weightdepot.store.tracing.lattice import MAX_PIECES, Frame, OutsideFrame, Piece, TooIrregular, cut


def compose(full: Layout, shards: Layout) -> Layout:
    """The layout from the tensors of `full` to the buffers of `shards`.

    full: the checkpoint's tensors in buffers that are whole tensors of an intermediate naming, of any nested
    strides. shards: tensors of the intermediate naming, in the buffers that this rank has. What the rank
    holds twice is placed twice. Buffers of `full` of which the rank holds nothing are left out with their
    tensors; so are intermediate tensors that no checkpoint tensor lies in (padding, what is not saved).

    Fills of `full` are not carried over: they say what a loader writes, not what an exporter reads.

    Raises LayoutError naming every intermediate tensor on which the two do not agree, and every checkpoint
    tensor that would fall into more than some thousands of pieces.
    """
    held: dict[str, list[Placement]] = defaultdict(list)
    for placement in shards.placements():
        held[placement.tensor].append(placement)
    buffers = {b.name: b for b in full.buffers}
    faults = _disagreements(buffers, shards.tensors)
    if faults:
        raise LayoutError("the two layouts do not speak of the same tensors", faults)

    builder = LayoutBuilder()
    for b in shards.buffers:
        builder.buffer(b.name, b.shape, b.strides, b.dtype)
    tensors = {t.name: t for t in full.tensors}
    frames: dict[tuple[tuple[int, ...], tuple[int, ...]], Frame] = {}

    def frame(shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
        found = frames.get((shape, strides))
        if found is None:
            found = frames[shape, strides] = Frame.of_tensor(shape, strides)
        return found

    for placement in full.placements():
        shares = held.get(placement.buffer)
        if not shares:
            continue
        spec, buffer = tensors[placement.tensor], buffers[placement.buffer]
        builder.tensor(spec.name, spec.shape, spec.dtype)
        try:
            between = frame(buffer.shape, buffer.strides)
            into = frame(spec.shape, contiguous_strides(spec.shape))
            for box, name, offset, strides in _through(placement, spec, between, into, shares):
                builder.place(spec.name, box, name, offset, strides)
        except (TooIrregular, OutsideFrame) as error:
            faults.append(LayoutFault(spec.name, f"in {buffer.name!r}: {error}"))
    if faults:
        raise LayoutError("what this rank holds of some tensors is no sensible number of boxes", faults)
    return builder.build()


def _disagreements(buffers: dict[str, BufferSpec], tensors: Sequence[TensorSpec]) -> list[LayoutFault]:
    faults = []
    for spec in tensors:
        whole = buffers.get(spec.name)
        if whole is not None and (whole.shape, whole.dtype) != (spec.shape, spec.dtype):
            faults.append(
                LayoutFault(
                    spec.name,
                    f"is {whole.dtype} {list(whole.shape)} as a whole, "
                    f"but the shards are of {spec.dtype} {list(spec.shape)}",
                )
            )
    return faults


def _through(
    placement: Placement, spec: TensorSpec, between: Frame, into: Frame, shares: Sequence[Placement]
) -> Iterator[tuple[Box, str, int, tuple[int, ...]]]:
    """Boxes of the checkpoint tensor, each with its buffer, offset and strides there."""
    # First as boxes of the intermediate tensor, with the place in the flat checkpoint tensor as image ...
    flat = contiguous_strides(spec.shape)
    box = placement.box
    start = sum(o * s for o, s in zip(box.offset, flat, strict=True))
    dims = zip(box.shape, placement.strides, flat, strict=True)
    pieces = [(*between.coordinates(p), p.image) for p in cut(placement.offset, start, dims, between)]
    made = 0
    for share in shares:
        for offset, shape, steps, image in pieces:
            common = Box(offset, shape).intersect(share.box)
            if common is None:
                continue
            # ... then what this shard has of each, as boxes of the checkpoint tensor, with the place in the
            # shard's buffer as image.
            ahead = [c - o for c, o in zip(common.offset, offset, strict=True)]
            inside = [c - o for c, o in zip(common.offset, share.box.offset, strict=True)]
            position = image + sum(a * s for a, s in zip(ahead, steps, strict=True))
            local = share.offset + sum(i * s for i, s in zip(inside, share.strides, strict=True))
            lattice = zip(common.shape, steps, share.strides, strict=True)
            found: list[Piece] = cut(position, local, lattice, into, MAX_PIECES - made)
            made += len(found)
            for piece in found:
                o, n, s = into.coordinates(piece)
                yield Box(o, n), share.buffer, piece.image, s
