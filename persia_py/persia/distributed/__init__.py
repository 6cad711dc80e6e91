"""Several trainer ranks.

* :mod:`persia.distributed.options`: how ranks train the dense part together
* :mod:`persia.distributed.run`: what this process has done for its run; the run's end and summary
* :mod:`persia.distributed.rendezvous`, :mod:`persia.distributed.handshake`: how ranks find and admit each other
* :mod:`persia.distributed.control_plane`: how they agree, and learn that one of them is lost, over a
  :mod:`persia.distributed.link` each
* :mod:`persia.distributed.network`: interfaces and GPUs that the environment names
"""

from persia.distributed.options import DDPOption, DistributedBaseOption, get_default_distributed_option
from persia.distributed.run import agree, fail, failure, finish, peers, report

__all__ = [
    "DDPOption",
    "DistributedBaseOption",
    "agree",
    "fail",
    "failure",
    "finish",
    "get_default_distributed_option",
    "peers",
    "report",
]
