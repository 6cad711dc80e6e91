#!/bin/sh -eu
# Make sure that the base image of all images exists: pull it, or create it with debootstrap if it cannot be pulled.
# Usage: tools/base_image.sh            (BASE=name selects another image, which is only pulled)
base=${BASE:-debian:trixie-slim}
here=$(cd "$(dirname "$0")/.." && pwd)

# If the environment names a certificate bundle, downloads pass through a proxy. The builds must trust this proxy too.
if [ -n "${SSL_CERT_FILE:-}" ] && [ -f "$SSL_CERT_FILE" ] && ! cmp -s "$SSL_CERT_FILE" "$here/services/ca/host.crt"; then
    cp "$SSL_CERT_FILE" "$here/services/ca/host.crt"
fi

if docker image inspect "$base" >/dev/null 2>&1 || said=$(docker pull --quiet "$base" 2>&1); then
    exit 0
fi
why=$(printf '%s\n' "$said" | tail -n 1)
if [ "$base" != debian:trixie-slim ]; then
    echo "$base cannot be pulled ($why), and only debian:trixie-slim can be created here" >&2
    exit 3
fi
if ! command -v debootstrap >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "$base cannot be pulled ($why); creating it requires root and debootstrap (Debian: apt-get install debootstrap)" >&2
    exit 3
fi

echo "$base cannot be pulled ($why); creating it with debootstrap (half a minute, once)"
root=$(mktemp -d)
trap 'rm -rf "$root" "$root.log"' EXIT
debootstrap --variant=minbase trixie "$root" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 3; }
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/* "$root"/usr/share/info/*
# As in the public image, package caches are not kept, and packages are not synced to disk one by one.
cat >"$root/etc/apt/apt.conf.d/docker-clean" <<'EOT'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
EOT
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/docker-apt-speedup"
tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - "$base" >/dev/null
