package systemd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// packageSetup starts a server whose program does not belong to the package.
const packageSetup = `cp /share/server /share/writer /usr/local/sbin/ &&
cp /share/server.service /etc/systemd/system/ && mkdir -p /export /data &&
systemctl daemon-reload && systemctl enable --now server`

// writer writes numbered lines to an open file on the mount, and ends with an error.
const writer = `#!/bin/sh
set -e
exec 3>/data/lines
i=1
while :; do
	echo $i >&3
	sync --data /data/lines
	echo $i >/run/written.new
	mv /run/written.new /run/written
	i=$((i + 1))
	sleep 0.2
done
`

// leftovers lists what a purge has left. The server, the journal and the logs of dpkg may stay.
const leftovers = `find / -xdev \( -path /proc -o -path /sys -o -path /tmp -o -path /share -o -path /var/log \) ` +
	`-prune -o -name '*nfsrdma*' -print`

// TestPackage installs, upgrades, removes and purges the Debian package on a host with systemd. All
// steps use one guest.
func TestPackage(t *testing.T) {
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	for _, version := range []string{"1.0.0", "1.0.1"} {
		kit.Make(t, "../../..", "deb", "RDMACORE=", "VERSION=v"+version, "DIST="+share,
			"MAINTAINER=Maintainer <m@example.com>")
	}
	lab.BuildPure(t, "build", "-o", filepath.Join(share, "server"), module+"cmd/nfsrdmad")
	unit := strings.ReplaceAll(serverUnit, "/usr/sbin/nfsrdmad", "/usr/local/sbin/server")
	kit.Must(t, errors.Join(os.WriteFile(filepath.Join(share, "server.service"), []byte(unit), 0o644),
		os.WriteFile(filepath.Join(share, "writer"), []byte(writer), 0o755)))
	g := boot(t, share)
	g.must(packageSetup)

	g.dpkg("-i /share/nfsrdmad_1.0.0-1_amd64.deb")
	g.must("systemctl is-enabled nfsrdmad && systemctl is-active nfsrdmad")
	g.must("echo 'log_level = \"debug\"' >/etc/nfsrdmad.toml && systemctl restart nfsrdmad")
	g.must("echo '127.0.0.1:/ /data nfsrdma _netdev 0 0' >>/etc/fstab && " +
		"echo '127.0.0.1:/ /auto nfsrdma _netdev,x-systemd.automount,x-systemd.idle-timeout=1s 0 0' >>/etc/fstab && " +
		"systemctl daemon-reload")
	g.await("systemctl start data.mount && grep -q ' /data fuse.nfsrdma ' /proc/mounts")
	g.automount()

	g.must("systemd-run -q --unit=writer /usr/local/sbin/writer")
	g.await("[ -s /run/written ]")
	before := g.pid()
	g.dpkg("-i /share/nfsrdmad_1.0.1-1_amd64.deb")
	g.newPID(before)
	g.writes()
	if exe := g.must("readlink /proc/" + g.pid() + "/exe"); exe != "/usr/sbin/nfsrdmad" {
		g.errorf("program of the daemon after the upgrade: got %s, want /usr/sbin/nfsrdmad", exe)
	}
	g.must("grep -q debug /etc/nfsrdmad.toml") // the upgrade keeps a changed configuration

	before = g.pid()
	out, err := g.RunFor("dpkg -r nfsrdmad", stepTimeout)
	if err == nil || !strings.Contains(out, "a mount is in use") {
		g.fatalf("removal while a program uses the mount: got error %v, want that it is refused: %s", err, out)
	}
	g.must("dpkg -l nfsrdmad | grep '^.i '") // "ri": to be removed, but installed
	if pid := g.pid(); pid != before {
		g.errorf("process of the daemon after a refused removal: got %s, want %s", pid, before)
	}
	g.writes()
	g.must("systemctl stop writer && n=$(cat /run/written) && seq $n >/run/want && " +
		"head -n $n /export/lines | cmp - /run/want")

	g.dpkg("-r nfsrdmad")
	g.must("! grep fuse.nfsrdma /proc/mounts && ! systemctl is-active nfsrdmad")
	left := strings.Fields(g.must(leftovers))
	if !slices.Contains(left, "/etc/nfsrdmad.toml") || !slices.Contains(left, "/var/lib/nfsrdmad") {
		g.errorf("files after the removal: got %q, want the configuration and the state", left)
	}
	g.must("systemctl stop auto.automount && sed -i '/nfsrdma/d' /etc/fstab && systemctl daemon-reload")
	g.dpkg("-P nfsrdmad")
	if out := g.must(leftovers); out != "" {
		g.errorf("files after the purge: got %q, want none", out)
	}
}

// writes waits until the writer has written more lines.
func (g *guest) writes() {
	g.t.Helper()
	g.await(fmt.Sprintf("! systemctl is-active -q writer || [ $(cat /run/written) -gt $((%s + 3)) ]",
		g.must("cat /run/written")))
	g.must("systemctl is-active -q writer")
}

// dpkg runs dpkg. Without a terminal it cannot ask about a changed configuration.
func (g *guest) dpkg(args string) {
	g.t.Helper()
	begin := time.Now()
	g.must("dpkg --force-unsafe-io " + args + " </dev/null")
	g.t.Logf("dpkg %s: %v", args, time.Since(begin).Round(time.Second))
}

// automount checks that an access mounts a directory with x-systemd.automount, that systemd
// unmounts it when it is idle, and that the next access mounts it again.
func (g *guest) automount() {
	g.t.Helper()
	g.must("echo world >/export/hello && systemctl start auto.automount")
	for range 2 {
		// The open file keeps systemd from unmounting.
		out := g.must("exec 3</auto/hello && cat <&3 && grep -q ' /auto fuse.nfsrdma ' /proc/mounts && " +
			"systemctl is-active auto.mount")
		if out != "world\nactive" {
			g.errorf("file of the automounted directory, and state of the mount: got %q, want world and active", out)
		}
		g.await("! grep ' /auto fuse.nfsrdma ' /proc/mounts")
	}
}
