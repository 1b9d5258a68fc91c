"""Publishing versions of a model from trainer ranks."""

from weightdepot.producers.aio import AsyncProducer
from weightdepot.producers.producer import Producer
from weightdepot.producers.publishing import Published
from weightdepot.producers.sealing import Sealed

__all__ = ["AsyncProducer", "Producer", "Published", "Sealed"]
