#!/bin/bash
# Builds the images of the lab's guests from Debian packages: for each kernel series the files
# CACHE/SERIES/{vmlinuz,initramfs.cpio,release}, and CACHE/systemd/root.ext4, a Debian with systemd.
# Usage: build.sh [6.1] [6.12] [systemd]     (default: all)
# Needs Debian 12 on amd64, root, and a configured apt. Does nothing if the images are up to date.
set -euo pipefail
shopt -s nullglob

[ $# -gt 0 ] || set -- 6.1 6.12 systemd
SERIES=() SYSTEMD=
for image; do
  case $image in systemd) SYSTEMD=1 ;; *) SERIES+=("$image") ;; esac
done
CACHE=${NFSRDMAD_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/nfsrdmad-lab}
SRC=$(cd "$(dirname "$0")" && pwd)

# Packages that run guests and record traffic, and packages for the build.
RUN_DEBS=(wireshark-common tshark) # and QEMU, see host_needs_qemu
BUILD_DEBS=(cpio gcc-12 kmod libc6-dev make xz-utils)
SYSTEMD_BUILD_DEBS=(debian-archive-keyring e2fsprogs mmdebstrap)
# Packages of the guest's userland. Dependencies are included; maintainer scripts do not run.
GUEST_DEBS=(busybox e2fsprogs ibverbs-providers ibverbs-utils iproute2 kmod nfs-common nfs-kernel-server
  rdma-core rdmacm-utils rpcbind tcpdump util-linux)
# Programs in the image. Their libraries are included.
GUEST_PROGRAMS=(
  /usr/bin/busybox /usr/bin/kmod /usr/bin/ip /usr/bin/rdma /usr/sbin/tc /usr/bin/ss
  /usr/sbin/rpcbind /usr/sbin/rpcinfo /usr/sbin/rpc.nfsd /usr/sbin/rpc.mountd /usr/sbin/exportfs /usr/sbin/nfsdcld
  /usr/sbin/mount.nfs /usr/sbin/umount.nfs /usr/sbin/showmount /usr/sbin/nfsstat /usr/sbin/rpc.statd
  /usr/sbin/mkfs.ext4 /usr/sbin/e2fsck /usr/bin/flock
  /usr/bin/ibv_devices /usr/bin/ibv_devinfo /usr/bin/rping /usr/bin/tcpdump)
# Packages of the Debian with systemd, besides the essential ones.
SYSTEMD_DEBS=(dbus iproute2 kmod mount procps systemd systemd-sysv util-linux)
SYSTEMD_SIZE=2G
# Kernel modules in the image, with their dependencies. The kernel requests the CRC modules by name
# at run time, so they are no dependencies.
GUEST_MODULES=(
  virtio_pci virtio_net virtio_blk virtio_console virtio_rng 9pnet_virtio 9p
  autofs4 ext4 libcrc32c crc32c_generic crc32c_intel crc32_generic crc32_pclmul
  nfsd nfs nfsv3 nfsv4 nfs_layout_nfsv41_files nfs_layout_flexfiles auth_rpcgss rpcsec_gss_krb5
  rpcrdma rdma_rxe rdma_ucm ib_uverbs iw_cm fuse virtiofs
  af_packet ifb sch_netem sch_tbf sch_ingress cls_matchall cls_u32 act_mirred act_police veth
  tcp_diag) # for ss -K

say() { printf 'lab: [%ss] %s\n' "$SECONDS" "$*"; }
die() { printf 'lab: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "build images: root required to install and unpack packages"
[ "$(dpkg --print-architecture)" = amd64 ] || die "build images: only amd64 is supported"
mkdir -p "$CACHE/debs/partial" "$CACHE/apt"
exec 9>"$CACHE/lock"
flock -n 9 || { say "waiting for another build"; flock 9; }

# quiet_update refreshes the package lists, at most once. It ignores errors of third-party sources.
updated=
quiet_update() {
  [ -z "$updated" ] || return 0
  updated=1
  say "refreshing apt's package lists"
  apt-get update -qq || true
}

# with_update runs an apt command. If it fails, with_update refreshes the package lists, which may
# be old or missing, and runs it again.
with_update() {
  "$@" >"$CACHE/apt/log" 2>&1 && return
  [ -z "$updated" ] || { cat "$CACHE/apt/log" >&2; die "failed: $*"; }
  quiet_update
  "$@" >"$CACHE/apt/log" 2>&1 || { cat "$CACHE/apt/log" >&2; die "failed: $*"; }
}

host_needs() {
  local missing=() p
  for p in "$@"; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || missing+=("$p")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  DEBIAN_FRONTEND=noninteractive with_update apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# debian_sources prints the apt sources of the host that are Debian's, one on each line.
debian_sources() {
  # shellcheck disable=SC2016 # the variables are those of apt
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' 'Origin: Debian' 'Architecture: amd64'
}

# host_needs_qemu installs QEMU from bookworm-backports, unless it is new enough. Versions before 8.1
# sometimes execute a breakpoint that the kernel of a guest has removed while it patched its code.
# The kernel then panics with "Oops: int3". QEMU's commit deba78709a fixed this.
host_needs_qemu() {
  local dir=$CACHE/apt/backports uri version apt
  version=$(dpkg-query -W -f '${db:Status-Status} ${Version}' qemu-system-x86 2>/dev/null) || true
  case $version in "installed "*) dpkg --compare-versions "${version#* }" lt 1:8.1 || return 0 ;; esac
  uri=$(debian_sources | sed -n 's/^deb \([^ ]*\) bookworm main$/\1/p' | head -1)
  [ -n "$uri" ] || { quiet_update; uri=$(debian_sources | sed -n 's/^deb \([^ ]*\) bookworm main$/\1/p' | head -1); }
  [ -n "$uri" ] || die "install QEMU 8.1: apt has no source for bookworm; add one, or install a newer qemu-system-x86"
  say "installing QEMU from bookworm-backports"
  # The host's own sources stay as they are.
  mkdir -p "$dir/lists/partial" "$dir/archives/partial"
  { debian_sources; echo "deb $uri bookworm-backports main"; } >"$dir/sources.list"
  apt=(apt-get -qq -o Dir::Etc::sourcelist="$dir/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$dir/lists"
    -o Dir::Cache::archives="$dir/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  if ! { "${apt[@]}" update && DEBIAN_FRONTEND=noninteractive \
    "${apt[@]}" install -y --no-install-recommends -t bookworm-backports qemu-system-x86; } >"$CACHE/apt/log" 2>&1; then
    cat "$CACHE/apt/log" >&2
    die "install QEMU 8.1 or newer from bookworm-backports"
  fi
  rm -rf "$dir"
}

# release prints the release and the package version of the kernel that the series' meta package
# depends on, or nothing if apt does not know it.
release() {
  local meta rel version
  case $1 in
  6.1) meta=linux-image-amd64 ;;
  *) meta=linux-image-$1-amd64 ;;
  esac
  rel=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: linux-image-\([0-9].*-amd64\)$/\1/p' | head -1)
  version=$(apt-cache policy "linux-image-$rel" 2>/dev/null | sed -n 's/^ *Candidate: //p')
  [ -z "$rel" ] || echo "$rel $version"
}

# fetch downloads packages of one version, without dependencies, unless they are in the cache.
fetch() {
  local version=$1 p want=() have; shift
  mkdir -p "$CACHE/debs/kernel"
  for p in "$@"; do
    have=("$CACHE/debs/kernel/${p}_${version}"_*.deb)
    [ ${#have[@]} -gt 0 ] || want+=("$p=$version")
  done
  [ ${#want[@]} -gt 0 ] || return 0
  (cd "$CACHE/debs/kernel" && with_update apt-get -qq -o APT::Sandbox::User=root download "${want[@]}")
}

# unpack unpacks a package into a tree whose /bin, /sbin and /lib are links into /usr.
unpack() { dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"; }

# build_siw compiles siw.ko from the source of the same kernel, because Debian's configuration
# omits it.
build_siw() {
  local series=$1 rel=$2 version=$3 dir=$CACHE/siw-$3 abi=${2%-amd64} kbuild tools headers tmp p
  [ ! -e "$dir/siw.ko" ] || return 0
  case $series in 6.1) kbuild=linux-kbuild-6.1 ;; *) kbuild=linux-kbuild-$abi ;; esac
  fetch "$version" "linux-headers-$rel" "linux-headers-$abi-common" "linux-source-$series"
  # Debian removes the build tools of a kernel when it has those of the next one, hours before it has
  # the signed image of that.
  tools=$version
  if ! (fetch "$tools" "$kbuild") >/dev/null 2>&1; then
    tools=$(apt-cache policy "$kbuild" | sed -n 's/^ *Candidate: //p')
    fetch "$tools" "$kbuild"
  fi
  say "kernel $rel: unpacking headers and siw's source"
  tmp=$CACHE/tmp-siw; rm -rf "$tmp"; mkdir -p "$tmp/headers" "$tmp/siw"
  headers=$tmp/headers
  # Unpack the headers instead of installing them: as packages they need a compiler and a kernel.
  for p in "linux-headers-${rel}_$version" "linux-headers-${abi}-common_$version" "${kbuild}_$tools"; do
    dpkg-deb -x "$CACHE/debs/kernel/$p"_*.deb "$headers"
  done
  sed -i "s,include /usr/src/,include $headers/usr/src/," "$headers/usr/src/linux-headers-$rel/Makefile"
  dpkg-deb --fsys-tarfile "$CACHE/debs/kernel/linux-source-${series}_$version"_*.deb |
    tar -xO "./usr/src/linux-source-$series.tar.xz" |
    tar -xJ -C "$tmp/siw" --strip-components=5 "linux-source-$series/drivers/infiniband/sw/siw"
  say "kernel $rel: compiling siw"
  # BPF type information would need pahole, and the lab does not use it.
  make -s -j"$(nproc)" -C "$headers/usr/src/linux-headers-$rel" M="$tmp/siw" CONFIG_RDMA_SIW=m \
    CONFIG_DEBUG_INFO_BTF_MODULES= modules >"$CACHE/siw.log" 2>&1 ||
    { tail -30 "$CACHE/siw.log" >&2; die "compile siw for $rel: see $CACHE/siw.log"; }
  strip --strip-debug "$tmp/siw/siw.ko"
  rm -rf "$dir"; mkdir -p "$dir"; mv "$tmp/siw/siw.ko" "$dir/"
  rm -rf "$tmp"
}

# build_userland unpacks the guest's packages with all dependencies, as on an empty machine.
build_userland() {
  local root=$CACHE/userland d name version
  local apt=(apt-get -o Dir::State::status="$CACHE/apt/status"
    -o Dir::State::extended_states="$CACHE/apt/extended_states"
    -o Dir::Cache="$CACHE/apt" -o Dir::Cache::archives="$CACHE/debs"
    -o APT::Sandbox::User=root --no-install-recommends -y)
  say "fetching the guest's userland"
  : >"$CACHE/apt/status"
  with_update "${apt[@]}" --download-only install "${GUEST_DEBS[@]}"
  rm -rf "$root"
  for d in bin sbin lib lib32 lib64 libx32; do mkdir -p "$root/usr/$d"; ln -s "usr/$d" "$root/$d"; done
  # The cache may contain older versions too, so unpack the versions that apt would install.
  "${apt[@]}" --simulate install "${GUEST_DEBS[@]}" |
    sed -n 's/^Inst \([^ ]*\) (\([^ ]*\) .*/\1 \2/p' | while read -r name version; do
    for d in "$CACHE/debs/${name}_${version//:/%3a}"_*.deb; do unpack "$d" "$root"; done
  done
}

# install_closure copies programs from the userland, with every library that they load.
install_closure() {
  local dst=$1 f; shift
  {
    echo /lib64/ld-linux-x86-64.so.2
    for f in "$@"; do
      [ -e "$CACHE/userland$f" ] || die "find $f: not in the guest's packages"
      echo "$f"
      # A script has no libraries.
      chroot "$CACHE/userland" /lib64/ld-linux-x86-64.so.2 --list "$f" | grep -o '/[^ ]*' || true
    done
  } | sort -u | while read -r f; do
    mkdir -p "$dst${f%/*}"
    cp -L "$CACHE/userland$f" "$dst$f"
  done
}

# install_modules copies modules of a kernel and their dependencies, uncompressed.
install_modules() {
  local dst=$1 rel=$2 version=$3 kernel=$4 m f d tree
  tree=$dst/usr/lib/modules/$rel
  mkdir -p "$tree/extra"
  cp "$kernel/lib/modules/$rel"/modules.{builtin,builtin.modinfo,order} "$tree/"
  depmod -b "$kernel" "$rel"
  for m in "${GUEST_MODULES[@]}"; do
    # A module may be built into the kernel, or be missing in this series.
    modprobe -d "$kernel" -S "$rel" --show-depends "$m" 2>/dev/null | sed -n 's/^insmod \([^ ]*\).*/\1/p'
  done | sort -u | while read -r f; do
    d=$tree/${f#"$kernel/lib/modules/$rel/"}
    mkdir -p "${d%/*}"
    case $f in
    *.xz) xz -dc "$f" >"${d%.xz}" ;;
    *) cp "$f" "$d" ;;
    esac
  done
  cp "$CACHE/siw-$version/siw.ko" "$tree/extra/"
  depmod -b "$dst" "$rel"
}

# build_image builds the image of one series.
build_image() {
  local series=$1 rel=$2 version=$3 out=$CACHE/$1 root=$CACHE/tmp-image kernel=$CACHE/tmp-kernel f
  fetch "$version" "linux-image-$rel"
  build_siw "$series" "$rel" "$version"
  rm -rf "$root" "$kernel"
  mkdir -p "$kernel" "$root"/usr/{bin,sbin,lib,lib64} "$root"/{proc,sys,dev,run,tmp,etc,root,mnt,disk,share,host} \
    "$root"/var/lib/nfs/{sm,sm.bak,rpc_pipefs,v4recovery,nfsdcld}
  for f in bin sbin lib lib64; do ln -s "usr/$f" "$root/$f"; done
  ln -s /run "$root/var/run"
  dpkg-deb -x "$CACHE/debs/kernel/linux-image-${rel}_$version"_*.deb "$kernel"
  install_closure "$root" "${GUEST_PROGRAMS[@]}"
  mkdir -p "$root/usr/lib/x86_64-linux-gnu/libibverbs" "$root/etc/libibverbs.d"
  local libs=usr/lib/x86_64-linux-gnu
  cp "$CACHE/userland/$libs"/libibverbs/lib{siw,rxe}-*.so "$root/$libs/libibverbs/"
  cp "$CACHE"/userland/etc/libibverbs.d/{siw,rxe}.driver "$root/etc/libibverbs.d/"
  cp -L "$CACHE/userland/$libs"/libnss_files.so* "$root/$libs/" 2>/dev/null || true # in libc since 2.34
  for f in modprobe insmod lsmod rmmod; do ln -s ../bin/kmod "$root/usr/sbin/$f"; done
  ln -s mount.nfs "$root/usr/sbin/mount.nfs4"
  # busybox provides only the programs that are missing.
  for f in $("$root/usr/bin/busybox" --list); do
    [ -e "$root/usr/bin/$f" ] || [ -e "$root/usr/sbin/$f" ] || ln -s busybox "$root/usr/bin/$f"
  done
  cp "$CACHE"/userland/etc/{protocols,services,rpc,netconfig} "$root/etc/"
  cp -r "$SRC/guest/etc/." "$root/etc/"
  install -m 755 "$SRC/guest/init" "$root/init"
  install -m 755 "$SRC/guest/command-port" "$root/usr/sbin/command-port"
  install_modules "$root" "$rel" "$version" "$kernel"
  mkdir -p "$out"; rm -f "$out/stamp"
  # Guests may be starting from the old image, so replace each file atomically.
  cp "$kernel/boot/vmlinuz-$rel" "$out/vmlinuz.new"
  echo "$rel" >"$out/release.new"
  (cd "$root" && find . | cpio -o -H newc --quiet) >"$out/initramfs.cpio.new"
  for f in vmlinuz release initramfs.cpio; do mv "$out/$f.new" "$out/$f"; done
  rm -rf "$root" "$kernel"
  say "kernel $rel: image of $(du -h "$out/initramfs.cpio" | cut -f1) in $out"
}

# build_systemd installs a Debian with the apt sources of the host that are Debian's, and makes a
# file system of it. Maintainer scripts run in a chroot; mmdebstrap keeps them from starting services.
build_systemd() {
  local root=$CACHE/tmp-systemd out=$CACHE/systemd sources=$CACHE/apt/sources.list unit
  host_needs "${SYSTEMD_BUILD_DEBS[@]}"
  debian_sources >"$sources"
  [ -s "$sources" ] || { quiet_update; die "build the Debian with systemd: no Debian sources in apt; run again"; }
  say "installing a Debian with systemd"
  rm -rf "$root"
  mmdebstrap --quiet --mode=root --variant=essential --format=directory \
    --include="$(IFS=,; echo "${SYSTEMD_DEBS[*]}")" bookworm "$root" "$sources" >"$CACHE/systemd.log" 2>&1 ||
    { tail -30 "$CACHE/systemd.log" >&2; die "install the Debian with systemd: see $CACHE/systemd.log"; }
  cp -r "$SRC/systemd/etc/." "$root/etc/"
  install -m 755 "$SRC/guest/command-port" "$root/usr/sbin/command-port"
  install -m 755 "$SRC/systemd/command-ports" "$root/usr/sbin/command-ports"
  mkdir -p "$root/share" "$root/var/log/journal" "$root/etc/systemd/system/multi-user.target.wants"
  ln -s ../lab.service "$root/etc/systemd/system/multi-user.target.wants/lab.service"
  ln -sf /lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
  # A login on the console would mix its output with the lab's lines.
  for unit in getty@tty1.service serial-getty@ttyS0.service; do ln -sf /dev/null "$root/etc/systemd/system/$unit"; done
  # With an ID this is not the first boot, which would preset all units.
  echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
  mkdir -p "$out"; rm -f "$out/stamp" "$out/root.ext4.new"
  mke2fs -q -t ext4 -E lazy_itable_init=1,lazy_journal_init=1 -d "$root" "$out/root.ext4.new" "$SYSTEMD_SIZE"
  mv "$out/root.ext4.new" "$out/root.ext4"
  rm -rf "$root"
  say "Debian with systemd: image of $(du -h "$out/root.ext4" | cut -f1) in $out"
}

# The contents of this directory and Debian's current kernel determine an image.
inputs=$(cd "$SRC" && find . -type f | sort | xargs sha256sum | sha256sum | cut -c1-16)
# current reports whether the image of a series is up to date. Without package lists it accepts any
# kernel.
current() {
  local have
  have=$(cat "$CACHE/$1/stamp" 2>/dev/null) || return 1
  [ "$have" = "$inputs $2" ] || { [ -z "$2" ] && [ "${have%% *}" = "$inputs" ]; }
}

host_needs "${RUN_DEBS[@]}"
host_needs_qemu
userland=
for series in "${SERIES[@]}"; do
  kernel=$(release "$series")
  if current "$series" "$kernel"; then
    say "kernel $(cat "$CACHE/$series/release"): image in $CACHE/$series is up to date"
    continue
  fi
  [ -n "$kernel" ] || { quiet_update; kernel=$(release "$series"); }
  [ -n "$kernel" ] || die "find kernel $series: unknown to apt; add bookworm and bookworm-security to its sources"
  host_needs "${BUILD_DEBS[@]}"
  [ -n "$userland" ] || { build_userland; userland=1; }
  build_image "$series" "${kernel% *}" "${kernel#* }"
  echo "$inputs $kernel" >"$CACHE/$series/stamp"
done
rm -rf "$CACHE/userland"
if [ -n "$SYSTEMD" ]; then
  version=$(apt-cache policy systemd | sed -n 's/^ *Candidate: //p')
  if current systemd "$version"; then
    say "Debian with systemd: image in $CACHE/systemd is up to date"
  else
    build_systemd
    echo "$inputs $version" >"$CACHE/systemd/stamp"
  fi
fi
