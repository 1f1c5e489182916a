package main

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// enterEmptyNetwork moves the test to a new network namespace, where all ports are free. It locks
// the goroutine of the test to a thread. The processes that the goroutine starts and the sockets
// that it creates are in the network namespace of this thread. The thread is never unlocked: it
// ends with the goroutine, and the namespace ends with it.
func enterEmptyNetwork(t *testing.T) {
	t.Helper()
	kit.NeedsFUSE(t)
	kit.NeedsPrograms(t, "ip")
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("unshare the network namespace: %v", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("set loopback up: %v: %s", err, out)
	}
}

// TestDefaultPortsNeedNoOptions serves, mounts and unmounts without any option for a port.
func TestDefaultPortsNeedNoOptions(t *testing.T) {
	enterEmptyNetwork(t)
	w := &testEnv{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = w.dir + "/s"
	if err := os.WriteFile(filepath.Join(w.mkdir(t, "export"), "hello"), []byte("world"), 0o644); err != nil {
		t.Fatal(err)
	}
	if rdma, tcp, _ := serveAt(t, w.dir+"/export"); rdma != "127.0.0.1:20049" || tcp != "127.0.0.1:20048" {
		t.Errorf("serve listens on %s and %s", rdma, tcp)
	}
	w.startDaemon(t)
	dir := w.mkdir(t, "mnt")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir).succeeds(t)
	w.checkMount(t, dir)
	wantText(t, "doctor", nfsrdmad(t, "doctor", "--control-socket", w.socket).succeeds(t).stdout,
		"ok mount-locks", dir+": the lock service of the server replies; ")
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	nfsrdmad(t, "serve", w.dir+"/export", "--rdma-listen", "127.0.0.1:0").
		fails(t, 2, "127.0.0.1:20048", "in use", "--tcp-listen")
}

func TestPortMapperErrors(t *testing.T) {
	enterEmptyNetwork(t)
	w := &testEnv{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = w.dir + "/s"
	w.startDaemonFor(t, "3s")
	dir := w.mkdir(t, "free")
	const mapper, mountd, nfsd = "127.0.0.1:111", "127.0.0.1:20048", "127.0.0.1:20049"
	hang := func(sunrpc.CallHeader) []byte { return nil }
	for _, tt := range []struct {
		name           string
		mapper, mountd tcpAnswer // nil for no listener
		want           string    // texts in the error, separated by |
	}{
		{"no server", nil, nil, "MNT / at " + mapper + "|refused|NFS server runs|start rpcbind|mountport="},
		{"port mapper does not reply", hang, nil, "MNT / at " + mapper + "|port mapper|mountport="},
		{"MOUNT is not registered", words(0), nil, "MNT / at " + mapper + "|not registered|start the NFS server"},
		{"port out of range", words(70000), nil, "MNT / at " + mapper + "|70000"},
		{"truncated reply", words(), nil, "MNT / at " + mapper + "|invalid reply"},
		{"closed port", words(20048), nil, "MNT / at " + mountd + "|refused"},
		{"MOUNT service does not reply", words(20048), hang, "MNT / at " + mountd + "|MOUNT service does not answer"},
		{"no port mapper, MOUNT at its usual port", nil, words(13), "MNT / at " + mountd + "|MNT3ERR_ACCES"},
		{"not registered, MOUNT at its usual port", words(0), words(13), "MNT / at " + mountd + "|MNT3ERR_ACCES"},
		{"MOUNT replies, RDMA port closed", words(20048), goodMount, "RDMA connection to " + nfsd + "|refused|port="},
	} {
		var close []func()
		for addr, answer := range map[string]tcpAnswer{mapper: tt.mapper, mountd: tt.mountd} {
			if answer != nil {
				l, err := net.Listen("tcp", addr)
				if err != nil {
					t.Fatalf("%s: %v", tt.name, err)
				}
				close = append(close, playRPC(l, answer))
			}
		}
		o := nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir)
		o.fails(t, 32, strings.Split(tt.want, "|")...)
		if t.Failed() {
			t.Log("in case:", tt.name)
		}
		for _, f := range close {
			f()
		}
	}
	nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t)
}
