"""Settings: what cannot work is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightdepot.api.settings import Settings, redacted
from weightdepot.store.errors import InvalidRequest


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": 70000}, "port 70000"),
        ({"run": "a b"}, "run name"),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"redis_url": "localhost:6379"}, "redis://HOST"),
        ({"redis_url": "http://h"}, "redis://HOST"),
        ({"redis_url": "redis://"}, "redis://HOST"),
        ({"redis_url": "redis://h:port"}, "redis://HOST"),
        ({"redis_url": "unix://"}, "unix:///PATH"),
        ({"redis_url": "redis://h", "data_dir": Path("d")}, "one of the two"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Settings(**values)


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://u:p@h:6380/1", "unix:///run/redis.sock", "redis://[::1]:6379"]
)
def test_redis_urls_are_taken(url: str) -> None:
    assert Settings(redis_url=url).redis_url == url


def test_a_password_is_never_shown() -> None:
    assert redacted("redis://user:secret@h:1/0") == "redis://user:***@h:1/0"
    with pytest.raises(InvalidRequest) as error:
        Settings(redis_url="http://user:secret@h")
    assert "secret" not in str(error.value)
