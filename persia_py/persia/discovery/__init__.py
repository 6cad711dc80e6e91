"""Find the parts of a job, which announce themselves to NATS.

* :mod:`persia.discovery.services`: the services of this job
* :mod:`persia.discovery.nats`: one query to NATS, for any job
"""
