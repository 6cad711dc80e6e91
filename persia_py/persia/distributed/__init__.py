"""Communication between trainer ranks.

* :mod:`persia.distributed.options`: the options of training the dense part on several ranks
* :mod:`persia.distributed.averaging`: averaging of dense gradients in regions, and their compression
* :mod:`persia.distributed.sharded`, :mod:`persia.distributed.wrapped`: a model that is sharded over ranks, and the
  access to the model inside each wrapper
* :mod:`persia.distributed.run`: the role of this process in its run; the end and summary of the run
* :mod:`persia.distributed.rendezvous`, :mod:`persia.distributed.handshake`: how ranks find and admit each other
* :mod:`persia.distributed.control_plane`: agreements between ranks and detection of lost ranks, over one
  :mod:`persia.distributed.link` per rank
* :mod:`persia.distributed.held`: the ranks that a debugger holds
* :mod:`persia.distributed.network`: network interfaces and GPUs named by the environment
"""

from persia.distributed.averaging import Compression
from persia.distributed.options import DDPOption, DistributedBaseOption, get_default_distributed_option
from persia.distributed.run import agree, fail, failure, finish, peers, report, stop
from persia.distributed.sharded import FSDPOption

__all__ = [
    "Compression",
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
    "stop",
]
