#!/bin/bash
# copyright.sh PROGRAM: print the copyright file of a package with PROGRAM: the license of nfsrdmad,
# and those of all Go modules in PROGRAM, which their authors require to be included.
set -euo pipefail
cat <<'END'
nfsrdmad is licensed under the Apache License, Version 2.0. On Debian systems
/usr/share/common-licenses/Apache-2.0 has its text. It is also at
https://www.apache.org/licenses/LICENSE-2.0.

The program contains the Go standard library and the Go modules below, with
these licenses.
END
cd "$(dirname "$0")/../.."
print() { printf '\n---- %s\n\n' "$1"; shift; cat "$@"; }
print "Go $(go env GOVERSION)" "$(go env GOROOT)/LICENSE"
mapfile -t modules < <(go version -m "$1" | awk '$1 == "dep" { print $2 "@" $3 }')
go list -m -f '{{.Path}} {{.Version}} {{.Dir}}' "${modules[@]}" | while read -r module version dir; do
	files=("$dir"/LICENSE* "$dir"/COPYING* "$dir"/NOTICE*)
	existing=()
	for f in "${files[@]}"; do [ ! -f "$f" ] || existing+=("$f"); done
	[ ${#existing[@]} -gt 0 ] || { echo "copyright.sh: $module $version has no license file" >&2; exit 1; }
	print "$module $version" "${existing[@]}"
done
