"""What the controller says on standard error: lines for people, or one JSON object each for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Literal

LogFormat = Literal["text", "json"]

FIELDS = ("model", "version", "rank", "group", "status", "path")  # `extra` of a record that is shown by name


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and what the record knows of FIELDS."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(level: str, form: LogFormat) -> None:
    """All of this process's logs, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
