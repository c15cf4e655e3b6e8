#!/bin/sh
# Prints the first of several interpreters that can import what is needed, and tells on stderr what the others lack:
#   sh tests/gpu/python.sh "cupy mpi4py" .venv/bin/python python3
needs=$1
shift
lacks=
for python do
  if ! path=$(command -v "$python"); then
    lacks="$lacks  $python: is not there
"
  # shellcheck disable=SC2086  # several names
  elif missing=$("$python" "$(dirname "$0")/imports.py" $needs 2>&1); then
    echo "$path"
    exit 0
  else
    lacks="$lacks$(printf '%s\n' "$missing" | sed "s|^|  $path: |")
"
  fi
done
cat >&2 << EOF
No Python has all of $needs:
${lacks}Without a network: python3 -m pip download --dest wheels NAMES   on a machine that has one, and the same Python;
  bring the folder here, and type: python3 -m pip install --no-index --find-links wheels NAMES
EOF
exit 1
