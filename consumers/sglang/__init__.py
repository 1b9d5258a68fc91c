"""SGLang: live engines as consumers, and its models as shadows without weights.

Importing this package does not import SGLang; its modules do. Written against SGLang 0.5.23.
"""
