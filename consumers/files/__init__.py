"""Versions as files: standard Hugging Face checkpoints (sharded safetensors and an index), and back.

shards.py    which tensor goes into which file, and where; what the files' headers say
places.py    where a checkpoint is written: a directory, or whatever fsspec reaches (S3)
export.py    one version, from the store into such a place
follow.py    every n-th version, as they come
command.py   `weightdepot export`
"""
