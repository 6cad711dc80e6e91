"""Code generated from ``rust_core/wire/proto/persia/v1``: messages and services of the protocol.

A test compares it with the proto files, and prints the command that writes it again.
"""
