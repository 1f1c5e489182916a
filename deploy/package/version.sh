#!/bin/sh
# version.sh DESCRIPTION SECONDS: print the version of a package, which dpkg and rpm accept.
#
# DESCRIPTION is the output of "git describe --tags --always --dirty", SECONDS the time of the
# commit since 1970. The versions of a tag, its release candidates and later commits sort in their
# order.
set -eu
version=${1#v} dirty='' commits=''
case $version in *-dirty) version=${version%-dirty} dirty=+dirty ;; esac
case $version in
*-[0-9]*-g[0-9a-f]*) # commits after a tag
	commits=${version##*-g} version=${version%-g*}
	commits=+${version##*-}.g$commits version=${version%-*}
	;;
esac
case $version in
[0-9]*.[0-9]*) ;;
*) version="0~$(date -u -d "@$2" +%Y%m%d%H%M%S).g$version" ;; # no tag
esac
case $version in *-*) version=${version%%-*}~${version#*-} ;; esac # v1.2.3-rc1
printf '%s\n' "$version$commits$dirty" | tr - .
