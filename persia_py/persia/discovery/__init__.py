"""What the parts of a job announce to NATS, and how to find it.

* :mod:`persia.discovery.services`: the services of this job
* :mod:`persia.discovery.nats`: one question to NATS, for every job on it
"""
