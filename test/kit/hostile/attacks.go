package hostile

import (
	"bytes"
	"context"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var cred = sunrpc.AppendAuthNone(nil)

// An attack is an action of the server that the protocol forbids.
type attack struct {
	name string
	// onWrite: the server attacks the read chunk of a WRITE. Otherwise it attacks the write chunk
	// of a READ.
	onWrite bool
	// pending: the server attacks before it replies to the call. Otherwise it attacks after the
	// call has ended.
	pending bool
	// run attacks and returns the status that the server gets. Success fails the test, except for
	// an RDMA Write over iWARP, whose completion only means that it was sent.
	run func(c *conn, s rpcrdma.Segment) verbs.Status
	// reads: the attack is an RDMA Read.
	reads bool
	// message: the attack accesses no memory.
	message bool
	// harmless: the connection may survive the attack.
	harmless bool
	// freed: the client frees the memory and allocates it again before the attack.
	freed bool
	// reply changes the Send of the reply, instead of run.
	reply func(wr *verbs.WorkRequest, s rpcrdma.Segment)
	// twoCalls: the attack needs two calls in flight. The reply to one carries the key of the
	// other.
	twoCalls bool
}

var attackBytes = bytes.Repeat([]byte{0xbd}, 64)

var attacks = []attack{
	{name: "late write", run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, attackBytes) }},
	{name: "late write of one byte at the end", run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, attackSize-1, attackBytes[:1])
	}},
	{name: "write beyond the end", run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, attackSize, attackBytes)
	}},
	{name: "write before the start", run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, -1, attackBytes)
	}},
	{name: "read of a write chunk", reads: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write with the next key", run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		s.Handle++
		return c.write(s, 0, attackBytes)
	}},
	{name: "write with the next index", run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		s.Handle += 1 << 8
		return c.write(s, 0, attackBytes)
	}},
	{name: "late read", reads: true, onWrite: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write to a read chunk", onWrite: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, attackBytes) }},
	{name: "read beyond the end", reads: true, onWrite: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) }},

	// The client has freed the memory before the attack.
	{name: "late write to freed memory", freed: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, attackBytes) }},
	{name: "late read of freed memory", reads: true, onWrite: true, freed: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},

	// The key is still valid.
	{name: "write with another key of the same index, call pending", pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			s.Handle ^= 1
			return c.write(s, 0, attackBytes)
		}},
	{name: "write with the previous index, call pending", pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			s.Handle -= 1 << 8
			return c.write(s, 0, attackBytes)
		}},
	{name: "write to a read chunk, call pending", onWrite: true, pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			return c.write(s, 0, attackBytes)
		}},
	{name: "read of a write chunk, call pending", reads: true, pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write beyond the end, call pending", pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, attackSize, attackBytes) }},
	{name: "read beyond the end, call pending", reads: true, onWrite: true, pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) }},
	{name: "write with the key of another connection", pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.other().write(s, 0, attackBytes) }},
	{name: "read with the key of another connection", reads: true, onWrite: true, pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			return c.other().read(s, 0, 64)
		}},

	// Messages.
	{name: "reply sent twice", message: true, harmless: true, run: func(c *conn, s rpcrdma.Segment) verbs.Status {
		c.send(&verbs.WorkRequest{Opcode: verbs.OpSend}, c.mem.Buf[:64]) // still holds the reply
		return verbs.StatusWRFlushErr
	}},
	{name: "invalidation of an unknown key", message: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			c.send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle ^ 1<<23)},
				c.mem.Buf[:64])
			return verbs.StatusWRFlushErr // the client may accept the message
		}},
	{name: "invalidation of the call's key without a request", harmless: true, pending: true,
		reply: func(wr *verbs.WorkRequest, s rpcrdma.Segment) {
			wr.Opcode, wr.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(s.Handle)
		}},
	{name: "invalidation of another call's key", pending: true, twoCalls: true},
	{name: "invalidation of a key of another connection", message: true, pending: true,
		run: func(c *conn, s rpcrdma.Segment) verbs.Status {
			c.other().send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle)},
				c.mem.Buf[:64])
			return verbs.StatusWRFlushErr
		}},
}

// A Client is the client transport under test, connected to the server.
type Client interface {
	nfs3.Caller
	Stats() Stats
}

// Stats are counters of a client.
type Stats struct {
	Connects uint64 // connections made
	Refused  uint64 // accesses by the server that the client's device refused
	// MRsFailed counts memory regions that a lost connection left in an unknown state. MRsRecovered
	// counts those that were then recovered, recycled or orphaned.
	MRsFailed, MRsRecovered uint64
}

// Config describes the client under test.
type Config struct {
	Provider func(t testing.TB) verbs.Provider // returns a provider for the server
	// listen address of the server; port 0 takes a free one
	Addr netip.AddrPort
	// Dial connects a client until the test ends.
	Dial func(t testing.TB, server netip.AddrPort) Client
	// Unanswered: a successful RDMA Write only means that it was sent, as over iWARP.
	Unanswered bool
	// Counted: the client's device counts the accesses that it refuses.
	Counted bool
	// Except holds the names of attacks that the device cannot refuse, with the reason.
	Except map[string]string
}

// client connects a client and reads once, so that the connection is in use.
func (cfg *Config) client(t testing.TB, v *Server) Client {
	t.Helper()
	c := cfg.Dial(t, v.Addr())
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var r nfs3.ReadResult
	if err := nfs3.NewClient(c, nfs3.Options{}).Read(ctx, cred, file(), 0, arena(t)[:100], &r); err != nil {
		t.Fatal(err)
	}
	return c
}

// Attacks runs every attack as a subtest. No attack may read or change memory of the client. The
// attacked call and the calls after it must return the right data, and every failed memory region
// must be recovered.
func Attacks(t *testing.T, cfg Config) {
	for name := range cfg.Except {
		if !slices.ContainsFunc(attacks, func(a attack) bool { return a.name == name }) {
			t.Errorf("Except names an unknown attack %q", name)
		}
	}
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			if why := cfg.Except[a.name]; why != "" {
				t.Skipf("the device cannot refuse this attack: %s", why)
			}
			a.play(t, &cfg)
		})
	}
}

// play runs one attack on a new client and a new server.
func (a *attack) play(t *testing.T, cfg *Config) {
	v := Serve(t, cfg.Provider(t), cfg.Addr)
	// The other client connects first, because conn.other uses its connection.
	other, attacked := cfg.client(t, v), cfg.client(t, v)
	c := nfs3.NewClient(attacked, nfs3.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	buf, err := membuf.Alloc(attackSize)
	if err != nil {
		t.Fatal(err)
	}
	free := func() { membuf.Free(buf) }
	defer func() { free() }()
	v.arm(a)

	var both sync.WaitGroup
	if a.twoCalls {
		second := arena(t)
		both.Go(func() {
			var r nfs3.ReadResult
			if err := c.Read(ctx, cred, file(), attackSize, second, &r); err != nil ||
				!right(second[:r.N], attackSize) || r.N != attackSize {
				t.Errorf("second call: got %v and %d bytes, want %d right bytes", err, r.N, attackSize)
			}
		})
	}
	if a.onWrite {
		copy(buf, Content(0, attackSize))
		var w nfs3.WriteResult
		err = c.Write(ctx, cred, file(), 0, buf, nfs3.FileSync, &w)
	} else {
		var r nfs3.ReadResult
		if err = c.Read(ctx, cred, file(), 0, buf, &r); err == nil && (r.N != attackSize || !right(buf, 0)) {
			t.Error("attacked call returned wrong bytes")
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	both.Wait()
	if a.freed {
		free()
		if buf, err = membuf.Alloc(attackSize); err != nil { // probably at the same address
			free = func() {}
			t.Fatal(err)
		}
	}
	for i := range buf {
		buf[i] = guard
	}
	close(v.proceed)
	select {
	case st := <-v.outcome:
		if st == verbs.StatusSuccess && !a.harmless && (a.reads || !cfg.Unanswered) {
			t.Error("attack succeeded")
		}
		t.Logf("status at the server: %v", st)
	case <-ctx.Done():
		t.Fatal("server did not attack")
	}
	time.Sleep(50 * time.Millisecond) // until accepted data is in memory
	if i := bytes.IndexFunc(buf, func(r rune) bool { return r != guard }); i >= 0 {
		t.Fatalf("byte %d changed after the call had ended", i)
	}
	a.checkClients(ctx, t, cfg, attacked, other)
}

// checkClients checks that both clients still read the right bytes, and checks their counters.
func (a *attack) checkClients(ctx context.Context, t *testing.T, cfg *Config, attacked, other Client) {
	t.Helper()
	for name, x := range map[string]Client{"attacked": attacked, "other": other} {
		next := arena(t)
		var r nfs3.ReadResult
		if err := nfs3.NewClient(x, nfs3.Options{}).Read(ctx, cred, file(), 4096, next, &r); err != nil ||
			r.N != attackSize || !right(next, 4096) {
			t.Errorf("next read on the %s connection: got %v and %d bytes, want %d right bytes", name, err, r.N,
				attackSize)
		}
	}
	here, there := attacked.Stats(), other.Stats()
	if connects := here.Connects + there.Connects; !a.harmless && connects < 3 {
		t.Errorf("got %d connections, want at least 3: the attack must end one", connects)
	}
	if refused := here.Refused + there.Refused; cfg.Counted && a.run != nil && !a.message && refused == 0 {
		t.Error("client counted no refused access")
	}
	for name, s := range map[string]Stats{"attacked": here, "other": there} {
		if s.MRsFailed != s.MRsRecovered {
			t.Errorf("%s client: got %d recovered, recycled or orphaned MRs, want %d, as many as failed", name,
				s.MRsRecovered, s.MRsFailed)
		}
	}
}

func arena(t testing.TB) []byte {
	t.Helper()
	b, err := membuf.Alloc(attackSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { membuf.Free(b) })
	return b
}

func file() nfs3.FH {
	fh, err := nfs3.NewFH([]byte("the file"))
	if err != nil {
		panic(err)
	}
	return fh
}
