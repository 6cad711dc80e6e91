"""Finds the processes of a job, which announce themselves to NATS.

* :mod:`persia.discovery.services`: the addresses of the services of this job
* :mod:`persia.discovery.nats`: a single query to NATS, for any job
"""
