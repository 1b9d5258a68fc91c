"""What crosses HTTP as JSON: requests are checked here, answers mirror the records of the index.

`fields` says what a name, a digest, a rank look like; `requests` and `answers` are made of them. The client
returns the records themselves (weightdepot.store.index.records); a test keeps the two alike.
"""
