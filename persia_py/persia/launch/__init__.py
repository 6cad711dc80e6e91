"""Starting, watching and ending the processes of a job.

Layout:

* :mod:`persia.launch.cli`: ``persia-launcher``
* :mod:`persia.launch.trainer`: the ranks of one trainer replica
* :mod:`persia.launch.data_loader`: the script of one data-compose replica
* :mod:`persia.launch.binaries`: embedding servers and middlewares
* :mod:`persia.launch.up`: a whole job on this host, described by :mod:`persia.launch.stack`
* :mod:`persia.launch.rank`, :mod:`persia.launch.data`: what runs inside the processes that are started
* :mod:`persia.launch.process`: one child process; :mod:`persia.launch.watch`: several, and the signals to us
"""
