"""Messages and services, generated from ``rust_core/wire/proto/persia/v1`` and from ``inference.proto`` in this folder.

A test compares the code with the proto files, and prints the command that regenerates it.
"""
