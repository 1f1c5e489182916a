package main

import (
	"bytes"
	"net"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// In a network namespace of its own the port mapper's port is free for peers of every kind.
func TestPortMapper(t *testing.T) {
	// The thread keeps the namespace, and ends with the goroutine: it is never unlocked.
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("a network namespace: %v", err)
			return
		}
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Errorf("loopback: %v: %s", err, out)
			return
		}
		portMapperCases(t)
	}()
	<-done
}

// portMapperCases runs on one thread: what it starts, and each socket that it makes, is in that
// thread's network namespace.
func portMapperCases(t *testing.T) {
	w := &world{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = w.dir + "/s"
	w.startDaemonFor(t, "3s")
	dir := w.mkdir(t, "free")
	const mapper, mountd = "127.0.0.1:111", "127.0.0.1:20048"
	hang := func(sunrpc.CallHeader) []byte { return nil }
	for _, tt := range []struct {
		name           string
		mapper, mountd tcpAnswer // nil: nobody listens
		says           []string
	}{
		{"nobody", nil, nil, []string{"MNT / at " + mapper, "port mapper", "refused", "start rpcbind", "mountport="}},
		{"the port mapper hangs", hang, nil, []string{"MNT / at " + mapper, "port mapper", "mountport="}},
		{"MOUNT is not registered", words(0), nil, []string{"MNT / at " + mapper, "does not know",
			"start the NFS server"}},
		{"a port out of range", words(70000), nil, []string{"MNT / at " + mapper, "70000"}},
		{"an answer that is cut", words(), nil, []string{"MNT / at " + mapper, "does not speak the protocol"}},
		{"the port of nobody", words(20048), nil, []string{"MNT / at " + mountd, "refused"}},
		{"the MOUNT service hangs", words(20048), hang,
			[]string{"MNT / at " + mountd, "MOUNT service does not answer"}},
		{"no port mapper, but MOUNT at its own port", nil, words(13), []string{"MNT / at " + mountd, "MNT3ERR_ACCES"}},
		{"MOUNT answers, and nobody at the RDMA port", words(20048), goodMount,
			[]string{"RDMA connection to 127.0.0.1:20049", "refused", "port="}},
	} {
		var close []func()
		for addr, answer := range map[string]tcpAnswer{mapper: tt.mapper, mountd: tt.mountd} {
			if answer != nil {
				l, err := net.Listen("tcp", addr)
				if err != nil {
					t.Errorf("%s: %v", tt.name, err)
					return
				}
				close = append(close, playRPC(l, answer))
			}
		}
		o := nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir)
		if t.Failed() {
			return
		}
		o.fails(t, 32, tt.says...)
		if t.Failed() {
			t.Log("in case:", tt.name)
		}
		for _, f := range close {
			f()
		}
	}
	nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t)
}
