"""Random programs of views, copies and writes, that run alike on real tensors and on recording ones.

A program is a list of numbers. Each instruction takes the numbers that it needs, modulo what is possible, so
that every list is a valid program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

CHECKPOINT: dict[str, tuple[int, ...]] = {"a": (6, 8), "b": (4, 3, 5), "c": (10,), "d": (2, 6, 4), "s": ()}
PARAMETERS: dict[str, tuple[int, ...]] = {"p": (12, 10), "q": (3, 6, 8), "r": (24,)}


class Numbers:
    def __init__(self, numbers: Sequence[int]) -> None:
        self._left: Iterator[int] = iter(numbers)

    def take(self, below: int) -> int:
        """The next number, modulo `below`. Raises StopIteration at the end of the program."""
        return next(self._left) % max(below, 1)

    def span(self, size: int) -> tuple[int, int]:
        start = self.take(size)
        return start, 1 + self.take(size - start)


def run(
    numbers: Sequence[int],
    parameters: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    each: bool = False,
) -> None:
    """Interpret the program. Parts of the parameters may stay as they are.

    `each`: one program for each tensor, as real loaders have, which know it when they are called with only
    some. Else one that mixes all tensors, and does something else when some are missing.
    """
    targets = list(parameters.values())
    parameters["r"].data.zero_()  # so that it may be read, too
    if not each:
        _run(Numbers(numbers), [w for _, w in weights], targets)
        return
    for name, w in weights:
        _run(Numbers(numbers[list(CHECKPOINT).index(name) :: len(CHECKPOINT)]), [w], targets)


def _run(n: Numbers, pool: list[Tensor], targets: list[Tensor]) -> None:
    while pool:
        try:
            _step(n, pool, targets)
        except StopIteration:
            return
        except (RuntimeError, IndexError):
            continue  # a write to a broadcast view: torch refuses it, with data and without


def _narrowed(n: Numbers, t: Tensor) -> Tensor:
    for dim in range(t.dim()):
        if t.shape[dim] and n.take(2):
            start, length = n.span(t.shape[dim])
            t = t.narrow(dim, start, length)
    return t


def _fit(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both cut to what they have in common."""
    while source.dim() > target.dim() and source.dim() > 1:
        source = source.flatten(0, 1)
    while target.dim() > source.dim() and source.dim() > 0:
        target = target.select(0, 0)
    if source.dim() == 0 or target.dim() == 0:
        return (source, target) if source.dim() == 0 else (source.flatten()[0], target)
    for dim in range(source.dim()):
        size = min(source.shape[dim], target.shape[dim])
        source = source if source.shape[dim] == 1 else source.narrow(dim, 0, size)
        target = target.narrow(dim, 0, size if source.shape[dim] > 1 else target.shape[dim])
    return source, target


def _write(n: Numbers, source: Tensor, target: Tensor) -> None:
    if source.untyped_storage()._cdata == target.untyped_storage()._cdata:
        source = source.clone()  # torch leaves open what overlapping copies do
    target = _narrowed(n, target)
    if n.take(3) == 0 and target.dim() > 1:
        target = target.transpose(0, 1)
    if n.take(5) == 0 and target.dim() and target.shape[0] > 1:
        target = target[:: 1 + n.take(2)]
    source, target = _fit(source, target)
    if source.dtype != target.dtype and n.take(2):
        source = source.to(target.dtype)
    if target.dim() and n.take(2):
        target[...] = source
    else:
        target.copy_(source)


def _indices(n: Numbers, size: int, count: int) -> Tensor:
    first, step = n.take(size), n.take(3)
    return (torch.arange(count) * step + first) % size if n.take(3) else (torch.arange(count) ** 2) % size


def _moved(n: Numbers, t: Tensor, dim: int, kind: int) -> Tensor:
    """The elements of `t` in an order that is no view."""
    size = t.shape[dim]
    if kind == 0:
        return t.flip(dim) if n.take(2) else t.flip(list(range(t.dim())))
    if kind == 1:
        return t.roll(n.take(size), dim) if n.take(2) else t.tril() if t.dim() > 1 else t.roll(1)
    if kind == 2:
        return t.index_select(dim, _indices(n, size, 1 + n.take(6)))
    if kind == 3:
        index: list[Tensor | slice] = [slice(None)] * t.dim()
        for d in range(t.dim()):
            if d == dim or n.take(2):
                index[d] = _indices(n, t.shape[d], 3)
        if n.take(3) == 0:
            index[dim] = torch.arange(size) % 2 == n.take(2)
            index = index[: dim + 1] if n.take(2) else [*(slice(None),) * dim, index[dim]]
        return t[tuple(index)]
    if kind == 4:
        shape = list(t.shape)
        shape[dim] = 1 + n.take(4)
        return t.gather(dim, (torch.arange(math.prod(shape)) * (1 + n.take(5)) % size).reshape(shape))
    mask = (torch.arange(t.numel()) % (2 + n.take(4)) == 0).reshape(t.shape)
    if n.take(3) == 0:
        return torch.masked_select(t, mask)
    return torch.where(mask, t, t.flip(0)) if n.take(2) else torch.where(mask, t, 0)


def _put(n: Numbers, source: Tensor, target: Tensor) -> None:
    """Writes to chosen elements of a parameter."""
    target = _narrowed(n, target)
    kind = n.take(4)
    rows = (torch.arange(target.shape[0]) % (1 + n.take(3))) == 0
    if kind == 0:
        target[rows] = [0, 2, -1.5][n.take(3)]
    elif kind == 1:
        target.masked_fill_(
            torch.ones(target.shape, dtype=torch.bool).triu(1) if target.dim() > 1 else rows, 3
        )
    elif kind == 2:
        target[rows] = source.flatten()[0] if source.numel() else 1
    else:
        source, target = _fit(source.clone(), target)
        if target.dim() and source.shape == target.shape and source.dtype == target.dtype:
            index = torch.arange(target.shape[0]).flip(0)
            if n.take(2):
                target[index] = source
            else:
                target.index_copy_(0, index, source)


def _step(n: Numbers, pool: list[Tensor], targets: list[Tensor]) -> None:
    code = n.take(36)
    t = pool[n.take(len(pool))]
    dims = t.dim()
    dim = n.take(dims)
    out: Tensor | None = None
    if code <= 4:
        _write(n, t, targets[n.take(len(targets))].data)
    elif code == 5:
        _narrowed(n, targets[n.take(len(targets))].data).fill_([0, 1, -2.5, 0.1][n.take(4)])
    elif code == 6:
        _narrowed(n, t).zero_()
    elif code == 7:
        out = torch.zeros([s + n.take(3) for s in t.shape], dtype=t.dtype)
        _write(n, t, out)
    elif code == 8:
        source = pool[n.take(len(pool))]
        if source.dtype == t.dtype:
            _write(n, source, t)
    elif code == 9:
        out = torch.cat([t, _narrowed(n, t)] if dims == 0 or n.take(2) else [t, t], dim) if dims else None
        if out is None:
            out = torch.stack([t, t])
    elif code == 10:
        out = torch.stack([t, t.clone()], n.take(dims + 1))
    elif code == 11:
        out = t.clone()
    elif code == 12:
        out = t.unsqueeze(0).expand(1 + n.take(3), *t.shape)
    elif code == 13:
        out = t.reshape(-1)
    elif code == 14:
        out = t.unsqueeze(dim)
    elif code == 15:
        # the code above makes views with broadcast dimensions; nothing may be written to those
        out = torch.nn.functional.pad(t, (n.take(2), n.take(3))) if dims else t.detach()
    elif code == 16:
        out = t.repeat([1 + n.take(2) for _ in range(dims)]) if dims else t.repeat(3)
    elif code == 17:
        out = t.contiguous()
    elif code == 18:
        out = (t.to(torch.bfloat16) if n.take(3) == 0 else t.to(torch.float64)).to(t.dtype)
    elif code == 26:
        out = _narrowed(n, targets[-1].data)
        out = out.clone() if n.take(2) else out
    elif code == 34:
        out = [t + 1, t * 2, -t, t.abs()][n.take(4)]
    elif code == 35:
        place = _narrowed(n, targets[n.take(len(targets))].data)
        if n.take(2):
            _write(n, t, place)
        [lambda: place.mul_(2), lambda: place.copy_(-place), lambda: place.add_(1)][n.take(3)]()
    elif code == 33:
        _put(n, t, targets[n.take(len(targets))].data)
    elif dims and t.shape[dim]:
        if 27 <= code <= 32:
            out = _moved(n, t, dim, code - 27)
        elif code == 19:
            out = t.narrow(dim, *n.span(t.shape[dim]))
        elif code == 20:
            out = t.select(dim, n.take(t.shape[dim]))
        elif code == 21:
            out = t.transpose(dim, n.take(dims))
        elif code == 22:
            parts = t.chunk(1 + n.take(3), dim)
            out = parts[n.take(len(parts))]
        elif code == 23:
            out = t[:: 1 + n.take(3)] if n.take(2) else t[..., :: 1 + n.take(3)]
        elif code == 24:
            size = t.shape[dim]
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            d = divisors[n.take(len(divisors))]
            out = t.unflatten(dim, (d, size // d))  # type: ignore[no-untyped-call]
        else:
            out = (
                t.reshape(t.shape[::-1])
                if n.take(2)
                else torch.cat(t.unbind(dim), 0)
                if dims > 1
                else t[None]
            )
    if out is not None and out.numel() <= 400 and out.dim() <= 5:
        pool.append(out)
