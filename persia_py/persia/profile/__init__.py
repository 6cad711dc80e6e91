"""Finds the bottleneck of a run: step times, traces, advice, and host memory.

* :mod:`persia.profile.stages`: the stages of a step
* :mod:`persia.profile.profiler`: records steps, in any training loop
* :mod:`persia.profile.report`: the table of a profile
* :mod:`persia.profile.advice`: advice on what to change
* :mod:`persia.profile.comm`: the time spent on look-ups, pushes and waiting for other ranks
* :mod:`persia.profile.memory`: the host memory of a command
"""

from persia.profile.profiler import Profiler

__all__ = ["Profiler"]
