# Notes what a build of the stack's images is given; test_images.py builds it in place of one of them.
ARG BASE=debian:trixie-slim
FROM ${BASE}
RUN test -n "$HTTP_PROXY" && printf %s "$HTTP_PROXY" | sha256sum > /proxy && ls /sys/class/net > /interfaces
