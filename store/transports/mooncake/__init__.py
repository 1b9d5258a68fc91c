"""Mooncake's Transfer Engine: RDMA, and TCP where there is no device.

The engine never runs in our own process. It cannot cancel a call, spins while it waits, holds the GIL for
up to a second when it is destroyed, ends the process where it could return an error, and does not survive
a fork. So each engine has a small process of its own, which shares memory with ours:

    transport.py   the protocol of `transports.base`: one serving engine, and lanes to read with
    lanes.py       a lane is an engine that reads, with its staging memory; and the pool of them
    engines.py     an engine's process, seen from outside: start it, ask it, kill it
    process.py     the same, seen from inside; the only file that imports mooncake
    batches.py     which reads to ask for, and where in staging their bytes go (pure)

Killing the process is how a call is cancelled: its sockets and queue pairs go with it, so that no byte
arrives once it was reaped, and its staging memory is not used again all the same.
"""
