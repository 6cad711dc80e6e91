"""The metrics of trainers and data-compose, for Prometheus, and the traces of steps.

* :mod:`persia.monitor.series`: every series by name
* :mod:`persia.monitor.trainer`: the counters of a rank between two scrapes
* :mod:`persia.monitor.feeding`: the counters of data-compose
* :mod:`persia.monitor.exporter`: the metrics port of this process, and pushing to a gateway after a short run
* :mod:`persia.monitor.trace`: the spans of traced steps, for OpenTelemetry
* :mod:`persia.monitor.memory`: the memory of this process and of its device
* :mod:`persia.monitor.gpus`: the GPUs of this host, and the processes on them

``docs/monitoring.md`` lists the series of all processes, including those of servers (Rust) and ``persia serve``.
"""
