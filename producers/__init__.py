"""Publishing versions of a model from trainer ranks."""

from weightdepot.producers.producer import Producer, Published

__all__ = ["Producer", "Published"]
