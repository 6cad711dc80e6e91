# Records the arguments that the builds of the stack's images get. test_images.py builds this file instead of an image.
ARG BASE=debian:trixie-slim
FROM ${BASE}
# Another value for each build: proxies are not part of the key of the build's cache.
ARG BUILD_ID
RUN test -n "$HTTP_PROXY" && printf %s "$HTTP_PROXY" | sha256sum > /proxy && ls /sys/class/net > /interfaces
