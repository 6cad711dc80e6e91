"""What limits a run: step times, traces, advice, and host memory.

* :mod:`persia.profile.stages`: the stages of a step, and the one that limits
* :mod:`persia.profile.profiler`: records steps, in any training loop
* :mod:`persia.profile.report`: the table of a profile
* :mod:`persia.profile.advice`: what to change
* :mod:`persia.profile.comm`: what look-ups, pushes and other ranks have cost so far
* :mod:`persia.profile.memory`: the host memory of a command
"""

from persia.profile.profiler import Profiler

__all__ = ["Profiler"]
