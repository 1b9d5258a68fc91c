"""Keeping a rollout engine's weights at a published version."""

from weightdepot.consumers.aio import AsyncConsumer
from weightdepot.consumers.consumer import Consumer
from weightdepot.consumers.generation import Generation
from weightdepot.consumers.pull import FromSource
from weightdepot.consumers.updating import Updated

__all__ = ["AsyncConsumer", "Consumer", "FromSource", "Generation", "Updated"]
