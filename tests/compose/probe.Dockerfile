# Notes what a build of the stack's images is given; test_images.py builds it in place of one of them.
ARG BASE=debian:trixie-slim
FROM ${BASE}
# Another value for each build: proxies are not part of the key of the build's cache.
ARG BUILD_ID
RUN test -n "$HTTP_PROXY" && printf %s "$HTTP_PROXY" | sha256sum > /proxy && ls /sys/class/net > /interfaces
