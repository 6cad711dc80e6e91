"""Sends batches from data-compose to the trainers.

A batch waits in one place only: the :class:`persia.feed.inbox.Inbox` of the rank that trains on it.

* :mod:`persia.feed.inbox`: the batches of all data-compose replicas for a rank, in alternating order
* :mod:`persia.feed.server`: fills a rank's inbox over gRPC
* :mod:`persia.feed.embedded`: in embedded mode, runs the data script in a thread of this process to fill it
* :mod:`persia.feed.sender`: the sending side of a data-compose replica, with one :mod:`persia.feed.rank_stream` per
  rank
* :mod:`persia.feed.replay`: checks whether a restarted data script sends the same batches
* :mod:`persia.feed.channel`: tokens, TLS and limits of gRPC connections
* :mod:`persia.feed.protocol`: limits of the protocol, and how a feed ends
"""
