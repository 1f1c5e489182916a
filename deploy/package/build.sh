#!/bin/bash
# build.sh deb|rpm ROOT DIR: make a package in DIR of the files that "make install" put below ROOT.
#
# "make deb" and "make rpm" call this script. It needs SOURCE_DATE_EPOCH, GOARCH, PKGVERSION,
# MAINTAINER and NFPM_PROGRAM. Packages of the same commit and the same tools have the same bytes.
set -euo pipefail
format=$1 root=$2 dir=$3
here=$(dirname "$0")
source=$here/../..
doc=$root/usr/share/doc/nfsrdmad

if [ "$format" = deb ]; then
	# zsh of Debian does not read site-functions below /usr/share.
	mkdir -p "$root/usr/share/zsh/vendor-completions"
	mv "$root"/usr/share/zsh/site-functions/* "$root/usr/share/zsh/vendor-completions/"
	rmdir "$root/usr/share/zsh/site-functions"
fi

mkdir -p "$doc/examples"
cp "$source"/{README,SECURITY}.md "$doc/"
cp -r "$source/docs" "$doc/"
# Links to files that the package does not have.
sed -i -E 's~\]\((\.\./)?((CHANGELOG|CONTRIBUTING)\.md|pkg/|test/)~](https://github.com/nfsrdmad/nfsrdmad/blob/main/\2~' \
	"$doc"/*.md "$doc"/docs/*.md
cp "$source"/deploy/prometheus/nfsrdmad.rules.yml "$source"/deploy/grafana/nfsrdmad.json "$doc/examples/"
"$here/copyright.sh" "$root/usr/sbin/nfsrdmad" >"$doc/copyright"
gzip -9n <"$source/CHANGELOG.md" >"$doc/changelog.gz"
if [ "$format" = deb ]; then
	gzip -9n >"$doc/changelog.Debian.gz" <<-END
		nfsrdmad ($PKGVERSION-1) unstable; urgency=medium

		  * Package of this version. See changelog.gz for the changes.

		 -- $MAINTAINER  $(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")
	END
fi
find "$root/usr/share/man" -type f -exec gzip -9nf {} +

# The program of the rdma-core provider needs a C library with the versions of its symbols.
LIBC_DEB='' LIBC_RPM=''
glibc=$(grep -ao 'GLIBC_2\.[0-9]*' "$root/usr/sbin/nfsrdmad" | sort -uV | tail -1 || true)
if [ -n "$glibc" ]; then
	LIBC_DEB="libc6 (>= ${glibc#GLIBC_})" LIBC_RPM="libc.so.6($glibc)(64bit)"
fi

find "$root" -type d -exec chmod 755 {} +
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
export LIBC_DEB LIBC_RPM ROOT=$root
# nfpm does not expand variables in the names of scripts.
sed "s|\${SCRIPTS}|$here|" "$here/nfpm.yaml" >"$root.yaml"
"$NFPM_PROGRAM" package --config "$root.yaml" --packager "$format" --target "$dir/" >/dev/null
rm -rf "$root" "$root.yaml"
