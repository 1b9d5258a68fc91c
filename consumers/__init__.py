"""Keeping a rollout engine's weights at a published version."""

from weightdepot.consumers.consumer import Consumer, Updated

__all__ = ["Consumer", "Updated"]
