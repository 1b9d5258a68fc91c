"""Lists of indices stay numbers: torch would put them on the meta device, with the tensor they index."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAKING = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_ALONG = (torch.take_along_dim, torch.Tensor.take_along_dim)


class Counting(TorchFunctionMode):
    """Beside the recorder, which sees no list become a tensor, and no `torch.tensor(..., device="meta")`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            if type(args[1]) in (list, tuple):
                args = (args[0], _index(args[1]), *args[2:])
        elif func in _MAKING:
            return _made(func, args, kwargs or {})
        elif func in _ALONG:
            return _taken_along(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _taken_along(source: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """As torch does it, but for its check that both are on one device."""
    if dim is None:
        return source.flatten().gather(0, indices.flatten())
    dim %= source.dim()
    one = [*source.shape[:dim], 1, *source.shape[dim + 1 :]]
    other = (*indices.shape[:dim], 1, *indices.shape[dim + 1 :])
    shape = list(torch.broadcast_shapes(one, other))  # type: ignore[no-untyped-call]
    along = [*shape[:dim], indices.shape[dim], *shape[dim + 1 :]]
    return source.expand([*shape[:dim], source.shape[dim], *shape[dim + 1 :]]).gather(
        dim, indices.expand(along)
    )


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index(i) for i in index) if any(isinstance(i, list) for i in index) else index
    if isinstance(index, list) and index and all(isinstance(i, int) for i in index):
        return torch.tensor(index)
    return index


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of whole numbers that is asked for on meta is made where it can be read."""
    out = func(*args, **kwargs)
    given = args[1] if func is torch.Tensor.new_tensor else args[0] if args else kwargs.get("data")
    if (
        isinstance(out, torch.Tensor)
        and out.device.type == "meta"
        and not isinstance(given, torch.Tensor)
        and not (out.dtype.is_floating_point or out.dtype.is_complex)
    ):
        return func(*args, **{**kwargs, "device": torch.device("cpu")})
    return out
