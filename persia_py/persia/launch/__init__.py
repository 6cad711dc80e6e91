"""Start, supervise and stop the processes of a job.

Commands:

* :mod:`persia.launch.cli`: ``persia-launcher``, which starts one part of a job
* :mod:`persia.launch.up`: ``persia up``, which runs a whole job on this host; :mod:`persia.launch.job_config`: its file
* :mod:`persia.launch.service_ctx`: the same inside a ``with`` block, for tests and notebooks

Parts of a job:

* :mod:`persia.launch.nn_worker`: the ranks of one trainer replica; :mod:`persia.launch.rank_main`: one rank
* :mod:`persia.launch.data_loader`: one data-compose replica; :mod:`persia.launch.data_loader_main`: its script
* :mod:`persia.launch.binaries`: embedding servers and middlewares
* :mod:`persia.launch.local_job`: NATS, servers and middlewares on this host

Processes:

* :mod:`persia.launch.process`: one child process; :mod:`persia.launch.die_with_parent` ties it to its parent
* :mod:`persia.launch.foreground`: one that has this terminal; :mod:`persia.launch.background`: one that outlives it
* :mod:`persia.launch.supervision`: events of several processes, and how they are stopped
* :mod:`persia.launch.logs`: their output
* :mod:`persia.launch.user_script`: a user's script inside this process
"""
