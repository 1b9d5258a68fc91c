"""Plain sockets, for networks without RDMA.

    frames.py      what travels: the hello, requests, the answer (pure)
    server.py      one thread that sends from segments to whoever knows their token
    transport.py   the protocol of `transports.base`: serving, and sources that read

Bytes go from the segment's pages to the socket with `sendfile`, without a copy of ours. Closing the socket
is how a read is cancelled: what arrives late has nowhere to land.
"""
