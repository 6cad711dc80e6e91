"""Start, supervise and stop the processes of a job.

Commands:

* :mod:`persia.launch.cli`: ``persia-launcher``, which starts one process of a job
* :mod:`persia.launch.up`: ``persia up``, which runs a whole job on this host; :mod:`persia.launch.job_config`: its file
* :mod:`persia.launch.service_ctx`: a whole job inside a ``with`` block, for tests and notebooks

Processes of a job:

* :mod:`persia.launch.nn_worker`: the ranks of one trainer replica; :mod:`persia.launch.rank_main`: one rank
* :mod:`persia.launch.data_loader`: one data-compose replica; :mod:`persia.launch.data_loader_main`: its script
* :mod:`persia.launch.binaries`: embedding servers and middlewares
* :mod:`persia.launch.local_job`: NATS, servers and middlewares on this host

Child processes:

* :mod:`persia.launch.process`: one child process; :mod:`persia.launch.die_with_parent` ties it to its parent
* :mod:`persia.launch.foreground`: a program that has this terminal; :mod:`persia.launch.background`: a program that
  outlives the terminal
* :mod:`persia.launch.supervision`: waiting for several processes, and stopping them
* :mod:`persia.launch.logs`: the output of processes
* :mod:`persia.launch.user_script`: a user's script inside this process
"""
