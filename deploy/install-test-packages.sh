#!/usr/bin/env bash
# Installs the system programs the tests use as real clients and for faults (psql and a PostgreSQL server, node, openssl, strace, fio, redis-server, systemd-analyze) where they are missing.
set -euo pipefail
missing=()
command -v psql >/dev/null || missing+=(postgresql-client)
command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing+=(postgresql)
for server in /usr/lib/postgresql/*/; do  # The tests of vectors are skipped where apt has no pgvector.
  [ -d "$server" ] || continue
  vector="postgresql-$(basename "$server")-pgvector"
  [ -e "/usr/share/postgresql/$(basename "$server")/extension/vector.control" ] && continue
  apt-cache show "$vector" >/dev/null 2>&1 && missing+=("$vector")
done
command -v npm >/dev/null || missing+=(nodejs npm)
command -v openssl >/dev/null || missing+=(openssl)
command -v strace >/dev/null || missing+=(strace)
command -v fio >/dev/null || missing+=(fio)
command -v redis-server >/dev/null || missing+=(redis-server)
command -v systemd-analyze >/dev/null || missing+=(systemd)
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "please install: ${missing[*]}" >&2
  exit 1
fi
sudo=""
[ "$(id -u)" -eq 0 ] || sudo="sudo"
echo "installing ${missing[*]}" >&2
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${missing[@]}" >/dev/null
