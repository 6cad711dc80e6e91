"""Several trainer ranks.

* :mod:`persia.distributed.options`: how several ranks train the dense part
* :mod:`persia.distributed.sharded`, :mod:`persia.distributed.wrapped`: a model that is sharded over ranks, and the
  whole model behind each wrapper
* :mod:`persia.distributed.run`: this process's part in its run; the run's end and summary
* :mod:`persia.distributed.rendezvous`, :mod:`persia.distributed.handshake`: how ranks find and admit each other
* :mod:`persia.distributed.control_plane`: agreements of ranks, and detection of lost ranks, over one
  :mod:`persia.distributed.link` each
* :mod:`persia.distributed.held`: the ranks that a debugger holds
* :mod:`persia.distributed.network`: network interfaces and GPUs named by the environment
"""

from persia.distributed.options import DDPOption, DistributedBaseOption, get_default_distributed_option
from persia.distributed.run import agree, fail, failure, finish, peers, report
from persia.distributed.sharded import FSDPOption

__all__ = [
    "DDPOption",
    "DistributedBaseOption",
    "FSDPOption",
    "agree",
    "fail",
    "failure",
    "finish",
    "get_default_distributed_option",
    "peers",
    "report",
]
