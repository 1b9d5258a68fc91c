"""Random programs of views, copies and writes, that run alike on real tensors and on recording ones.

A program is a list of numbers. Each instruction takes the numbers that it needs, modulo what is possible, so
that every list is a valid program.
"""

from __future__ import annotations

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
    numbers: Sequence[int], parameters: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Interpret the program. Ends with whole copies into some parameters never promised: parts may stay."""
    pool = [w for _, w in weights]
    targets = list(parameters.values())
    n = Numbers(numbers)
    parameters["r"].data.zero_()  # so that it may be read, too
    while True:
        try:
            _step(n, pool, targets)
        except StopIteration:
            return
        except RuntimeError:
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


def _step(n: Numbers, pool: list[Tensor], targets: list[Tensor]) -> None:
    code = n.take(27)
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
        out = (t.to(torch.bfloat16) if n.take(16) == 0 else t.to(torch.float64)).to(t.dtype)
    elif code == 26:
        out = _narrowed(n, targets[-1].data)
        out = out.clone() if n.take(2) else out
    elif dims and t.shape[dim]:
        if code == 19:
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
