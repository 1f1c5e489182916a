package main

import (
	"bytes"
	"net"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestPortMapperErrors runs in a new network namespace, where the port of the port mapper is free.
func TestPortMapperErrors(t *testing.T) {
	testutil.NeedsFUSE(t)
	testutil.NeedsPrograms(t, "ip")
	// The thread is never unlocked: it ends with the goroutine, and the namespace ends with it.
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("unshare the network namespace: %v", err)
			return
		}
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Errorf("set loopback up: %v: %s", err, out)
			return
		}
		portMapperCases(t)
	}()
	<-done
}

// portMapperCases runs on one thread. The processes that it starts and the sockets that it creates
// are in the network namespace of this thread.
func portMapperCases(t *testing.T) {
	w := &testEnv{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = w.dir + "/s"
	w.startDaemonFor(t, "3s")
	dir := w.mkdir(t, "free")
	const mapper, mountd = "127.0.0.1:111", "127.0.0.1:20048"
	hang := func(sunrpc.CallHeader) []byte { return nil }
	for _, tt := range []struct {
		name           string
		mapper, mountd tcpAnswer // nil for no listener
		want           []string
	}{
		{"no port mapper", nil, nil, []string{"MNT / at " + mapper, "port mapper", "refused", "start rpcbind",
			"mountport="}},
		{"port mapper does not reply", hang, nil, []string{"MNT / at " + mapper, "port mapper", "mountport="}},
		{"MOUNT is not registered", words(0), nil, []string{"MNT / at " + mapper, "not registered",
			"start the NFS server"}},
		{"port out of range", words(70000), nil, []string{"MNT / at " + mapper, "70000"}},
		{"truncated reply", words(), nil, []string{"MNT / at " + mapper, "invalid reply"}},
		{"closed port", words(20048), nil, []string{"MNT / at " + mountd, "refused"}},
		{"MOUNT service does not reply", words(20048), hang,
			[]string{"MNT / at " + mountd, "MOUNT service does not answer"}},
		{"no port mapper, MOUNT at its usual port", nil, words(13), []string{"MNT / at " + mountd, "MNT3ERR_ACCES"}},
		{"MOUNT replies, RDMA port closed", words(20048), goodMount,
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
		o.fails(t, 32, tt.want...)
		if t.Failed() {
			t.Log("in case:", tt.name)
		}
		for _, f := range close {
			f()
		}
	}
	nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t)
}
