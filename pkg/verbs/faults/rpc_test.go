package faults_test

import (
	"bytes"
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const procRead = 6 // NFSPROC3_READ (RFC 1813 §3.3.6)

// file is an NFS server of one endless file. Each byte depends on its offset.
type file struct{}

func fill(off uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		o := off + uint64(i)
		b[i] = byte(o*7 + o>>8 + o>>16)
	}
	return b
}

func (file) ServeRPC(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	if h.Proc == 0 {
		return reply, nil
	}
	d := sunrpc.NewDecoder(args)
	d.Opaque(64)
	off, n := d.Uint64(), d.Uint32()
	if h.Proc == procRead {
		// NFS3_OK, no attributes, count, no EOF, length
		for _, v := range []uint32{0, 0, n, 0, n} {
			reply = sunrpc.AppendUint32(reply, v)
		}
		reply = append(reply, fill(off, int(n))...)
		return append(reply, make([]byte, (4-n%4)%4)...), d.Err()
	}
	d.Uint32()
	if data := d.Opaque(1 << 20); d.Err() != nil || !bytes.Equal(data, fill(off, len(data))) {
		// NFS3ERR_IO, no wcc data
		return sunrpc.AppendUint32(sunrpc.AppendUint64(reply, 5<<32), 0), nil
	}
	// NFS3_OK, no wcc data, count, FILE_SYNC, verifier
	for _, v := range []uint32{0, 0, 0, n, 2, 0, 42} {
		reply = sunrpc.AppendUint32(reply, v)
	}
	return reply, nil
}

// TestRPCSurvivesFaults checks reads and writes under each fault of the client or server.
func TestRPCSurvivesFaults(t *testing.T) {
	for _, c := range []struct{ name, client, server string }{
		{"disconnect-every", "disconnect-every=~60", ""},
		{"post-fail", "post-fail=~60:*", ""},
		{"flush-reg", "flush-reg=~40", ""},
		{"reg-error", "reg-error=~50", ""},
		{"linv-error", "linv-error=~20", ""},
		{"delay-reply", "delay-reply=~10:5ms", ""},
		{"credits", "credits=1", ""},
		{"alloc-fail", "alloc-fail=~10", ""},
		{"dereg-fail", "disconnect-every=~60,dereg-fail=~5", ""},
		{"connect-fail", "disconnect-every=~60,connect-fail=2", ""},
		{"late-write", "", "late-write=~40"},
		{"late-read", "", "late-read=~40"},
		{"stale-key", "", "stale-key=~40"},
		{"wild-write", "", "wild-write=~40"},
		{"server disconnects", "", "disconnect-every=~60"},
		{"server posts fail", "", "post-fail=~60:*"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// With remote invalidation the client posts few LocalInvs.
			runRPC(t, "seed=1,"+c.client, "seed=2,"+c.server, c.name != "linv-error")
		})
	}
}

func runRPC(t *testing.T, clientSpec, serverSpec string, remoteInv bool) {
	client, server := withFaults(t, strings.TrimSuffix(clientSpec, ",")), withFaults(t,
		strings.TrimSuffix(serverSpec, ","))
	l, err := server.Listen(verbstest.Context(t), loopback)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svcrdma.Serve(ctx, l, svcrdma.Config{Handler: file{}, RemoteInv: remoteInv}) }()
	defer func() {
		cancel()
		l.Close()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	tr, err := xprt.New(xprt.Config{Provider: client, Addr: l.Addr(), ReconnectMin: 5 * time.Millisecond,
		ReconnectMax: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if err := tr.Connect(verbstest.Context(t)); err != nil {
		t.Fatal(err)
	}
	readAndWrite(t, tr)
	var injected uint64
	for _, p := range []*faults.Provider{client, server} {
		for _, c := range p.Counts() {
			injected += c.Injected
		}
	}
	t.Log(client.Counts(), server.Counts())
	if injected == 0 {
		t.Error("injected faults: got 0, want at least 1")
	}
}

// readAndWrite reads and writes from several goroutines and checks the data.
func readAndWrite(t *testing.T, tr *xprt.Transport) {
	fh, err := nfs3.NewFH([]byte("the file"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cred := verbstest.Context(t), sunrpc.AppendAuthNone(nil)
	c := nfs3.NewClient(tr, nfs3.Options{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			buf, err := membuf.Alloc(40001)
			if err != nil {
				t.Error(err)
				return
			}
			defer membuf.Free(buf)
			for i := range 40 {
				off, size := uint64(w*1000000+i*777), (i*2711+w)%len(buf)
				var r nfs3.ReadResult
				if err := c.Read(ctx, cred, fh, off, buf[:size], &r); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if !bytes.Equal(buf[:size], fill(off, size)) {
					t.Errorf("worker %d: wrong data at offset %d", w, off)
					return
				}
				var wr nfs3.WriteResult
				if err := c.Write(ctx, cred, fh, off, buf[:size], nfs3.FileSync, &wr); err != nil {
					t.Errorf("write: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
}
