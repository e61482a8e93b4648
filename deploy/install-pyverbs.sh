#!/usr/bin/env bash
# Puts Debian's pyverbs into the virtual environment (default .venv): only the package's folder,
# nothing is installed on the machine. PyPI has pyverbs as source only, to be compiled with all of
# rdma-core. RDMA also needs libibverbs with its providers (rdma-core, or ibverbs-providers).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python="$venv/bin/python"
works() {
  "$python" - <<'PY'
import glob, os, sys, sysconfig
folder = os.path.join(sysconfig.get_path("platlib"), "pyverbs")
suffix = sysconfig.get_config_var("EXT_SUFFIX")
sys.exit(0 if glob.glob(os.path.join(folder, "device" + suffix)) else 1)
PY
}
works && exit 0
for tool in apt-get dpkg-deb; do
  if ! command -v "$tool" >/dev/null; then
    echo "install-pyverbs: $tool is missing: this is no Debian or Ubuntu." >&2
    echo "Build pyverbs with the rdma-core of your system: cmake -DNO_PYVERBS=0, see docs/rdma.md" >&2
    exit 1
  fi
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fetch() { (cd "$scratch" && apt-get -qq -oAPT::Sandbox::User=root download python3-pyverbs); }
if ! fetch 2>/dev/null; then
  sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  $sudo apt-get update -qq
  fetch
fi
target=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
dpkg-deb --fsys-tarfile "$scratch"/python3-pyverbs_*.deb |
  tar -x -C "$target" --strip-components=5 ./usr/lib/python3/dist-packages/pyverbs
if ! works; then
  built=$(cd "$target/pyverbs" && ls device.*.so)
  rm -rf "$target/pyverbs"
  echo "install-pyverbs: the package has $built, which $("$python" -V) can't load." >&2
  echo "Make the virtual environment with the system's own python3 (make setup PYTHON=/usr/bin/python3)." >&2
  exit 1
fi
