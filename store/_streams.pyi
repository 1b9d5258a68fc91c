def copy(
    to: int,
    from_: int,
    piece: int,
    shape: int,
    to_strides: int,
    from_strides: int,
    first: int,
    groups: int,
    dims: int,
    part: int,
    parts: int,
    /,
) -> None: ...
def streaming() -> bool: ...
