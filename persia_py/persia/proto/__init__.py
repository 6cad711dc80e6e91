"""Code generated from ``rust_core/wire/proto/persia/v1``, and from ``inference.proto`` here: messages and services.

A test compares it with the proto files, and prints the command that writes it again.
"""
