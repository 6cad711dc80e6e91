"""``persia dump``: a redacted archive about a job, for a report.

* :mod:`persia.doctor.dump.redact`: the removal of secrets from texts
* :mod:`persia.doctor.dump.archive`: the archive, its manifest, and its limits
* :mod:`persia.doctor.dump.here`: the data of this host: versions, configuration, the folder of a run, the surrounding
  job
* :mod:`persia.doctor.dump.stack`: the data of the stack in containers
* :mod:`persia.doctor.dump.summary`: ``SUMMARY.md``, the text of the report
"""
