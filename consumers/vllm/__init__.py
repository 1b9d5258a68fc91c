"""vLLM: its models as shadows without weights, and where their loaders put each element.

Importing this package does not import vLLM; its modules do.
"""
