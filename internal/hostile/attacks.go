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

// An attack is what no server may do.
type attack struct {
	name  string
	write bool // of the read chunk of a WRITE, else of the write chunk of a READ
	alive bool // before the call is answered, else after it has ended
	// strike does it, and says how it went. Success is a breach, but of a Write over iWARP, which
	// is sent and no more.
	strike func(c *conn, s rpcrdma.Segment) verbs.Status
	// reads: the attack is a Read.
	reads bool
	// message: it reaches for no memory.
	message bool
	// harmless: the connection may go on.
	harmless bool
	// freed: the memory is given back, and made anew, before the strike.
	freed bool
	// reply changes the Send of the reply instead.
	reply func(wr *verbs.WorkRequest, s rpcrdma.Segment)
	// second needs two calls at a time: the strike is the reply to one with the key of the other.
	second bool
}

var bad = bytes.Repeat([]byte{0xbd}, 64)

var attacks = []attack{
	{name: "late write", strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, bad) }},
	{name: "late write of one octet at the end", strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, attackSize-1, bad[:1])
	}},
	{name: "write beyond the end", strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s,
			attackSize, bad)
	}},
	{name: "write before the start", strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, -1,
			bad)
	}},
	{name: "read of a write chunk", reads: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write with the next key", strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		s.Handle++
		return c.write(s, 0, bad)
	}},
	{name: "write with a neighbour's index", strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		s.Handle += 1 << 8
		return c.write(s, 0, bad)
	}},
	{name: "late read", reads: true, write: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write to a read chunk", write: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, bad) }},
	{name: "overlong read", reads: true, write: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) }},

	// The memory is another's by then.
	{name: "late write to freed memory", freed: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, bad) }},
	{name: "late read of freed memory", reads: true, write: true, freed: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},

	// While the key is good.
	{name: "another key of the same index, in time", alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
			s.Handle ^= 1
			return c.write(s, 0, bad)
		}},
	{name: "a neighbour's index, in time", alive: true, strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		s.Handle -= 1 << 8
		return c.write(s, 0, bad)
	}},
	{name: "write to a read chunk, in time", write: true, alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
			return c.write(s, 0, bad)
		}},
	{name: "read of a write chunk, in time", reads: true, alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write beyond the end, in time", alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.write(s, attackSize, bad) }},
	{name: "overlong read, in time", reads: true, write: true, alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) }},
	{name: "write with the key of another connection", alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status { return c.other().write(s, 0, bad) }},
	{name: "read with the key of another connection", reads: true, write: true, alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
			return c.other().read(s, 0, 64)
		}},

	// Messages.
	{name: "the reply twice", message: true, harmless: true, strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
		c.send(&verbs.WorkRequest{Opcode: verbs.OpSend}, c.mem.Buf[:64]) // as it was sent
		return verbs.StatusWRFlushErr
	}},
	{name: "invalidation of a key that nobody has", message: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
			c.send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle ^ 1<<23)},
				c.mem.Buf[:64])
			return verbs.StatusWRFlushErr // that it was taken is no breach
		}},
	{name: "invalidation of the call's key, which was not asked for", harmless: true, alive: true,
		reply: func(wr *verbs.WorkRequest, s rpcrdma.Segment) {
			wr.Opcode, wr.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(s.Handle)
		}},
	{name: "invalidation of another call's key", alive: true, second: true},
	{name: "invalidation of a key of another connection", message: true, alive: true,
		strike: func(c *conn, s rpcrdma.Segment) verbs.Status {
			c.other().send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle)},
				c.mem.Buf[:64])
			return verbs.StatusWRFlushErr
		}},
}

// A Client is what is attacked: a transport of ours that is connected to the server.
type Client interface {
	nfs3.Caller
	Stats() Stats
}

// Stats are counters of a client.
type Stats struct {
	Connects uint64 // connections made
	Refused  uint64 // accesses of the server that its device refused
	// memory regions that a lost connection hurt, and that were recovered, recycled or orphaned
	MRsFailed, MRsRecovered uint64
}

// A Config says what is attacked.
type Config struct {
	Provider func(t testing.TB) verbs.Provider // makes one for the server
	Addr     netip.AddrPort                    // for the server to listen on, port 0 for any
	// Dial connects a client, until the test ends.
	Dial func(t testing.TB, server netip.AddrPort) Client
	// Unanswered: an RDMA Write that succeeded was sent, and no more is known of it, as over iWARP.
	Unanswered bool
	// Counted: the device counts what it refuses.
	Counted bool
	// Except names attacks that a device allows by itself, with the reason.
	Except map[string]string
}

// client is a client that has heard the server.
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

// Attacks plays a server that reaches for memory it has no right to. No attempt may succeed, or
// change or tell memory; the calls that it meets, and those after it, have their data; and whatever
// the attack hurts is mended.
func Attacks(t *testing.T, cfg Config) {
	for name := range cfg.Except {
		if !slices.ContainsFunc(attacks, func(a attack) bool { return a.name == name }) {
			t.Errorf("there is no attack %q to be excepted", name)
		}
	}
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			if why := cfg.Except[a.name]; why != "" {
				t.Skipf("the device allows it: %s", why)
			}
			a.play(t, &cfg)
		})
	}
}

// play is one attack, with a client and a server of its own.
func (a *attack) play(t *testing.T, cfg *Config) {
	v := Serve(t, cfg.Provider(t), cfg.Addr)
	// The other connection first: its keys are the server's as well.
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
	if a.second {
		second := arena(t)
		both.Go(func() {
			var r nfs3.ReadResult
			if err := c.Read(ctx, cred, file(), attackSize, second, &r); err != nil ||
				!right(second[:r.N], attackSize) || r.N != attackSize {
				t.Errorf("the other call: %v, or wrong octets", err)
			}
		})
	}
	if a.write {
		copy(buf, Content(0, attackSize))
		var w nfs3.WriteResult
		err = c.Write(ctx, cred, file(), 0, buf, nfs3.FileSync, &w)
	} else {
		var r nfs3.ReadResult
		if err = c.Read(ctx, cred, file(), 0, buf, &r); err == nil && (r.N != attackSize || !right(buf, 0)) {
			t.Error("the call has wrong octets")
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	both.Wait()
	if a.freed {
		free()
		if buf, err = membuf.Alloc(attackSize); err != nil { // where the other was, most likely
			free = func() {}
			t.Fatal(err)
		}
	}
	for i := range buf {
		buf[i] = guard
	}
	close(v.may)
	select {
	case st := <-v.struck:
		if st == verbs.StatusSuccess && !a.harmless && (a.reads || !cfg.Unanswered) {
			t.Error("the attack succeeded")
		}
		t.Logf("the attacker was told: %v", st)
	case <-ctx.Done():
		t.Fatal("the attack was not made")
	}
	time.Sleep(50 * time.Millisecond) // what was let in is placed
	if i := bytes.IndexFunc(buf, func(r rune) bool { return r != guard }); i >= 0 {
		t.Fatalf("octet %d was changed after the call had ended", i)
	}
	for name, x := range map[string]Client{"attacked": attacked, "other": other} {
		next := arena(t)
		var r nfs3.ReadResult
		if err := nfs3.NewClient(x, nfs3.Options{}).Read(ctx, cred, file(), 4096, next, &r); err != nil ||
			r.N != attackSize || !right(next, 4096) {
			t.Errorf("next read on the %s connection: %v, or wrong octets", name, err)
		}
	}
	here, there := attacked.Stats(), other.Stats()
	if connects := here.Connects + there.Connects; !a.harmless && connects < 3 {
		t.Errorf("%d connections were made, want one more than two: the attack has to end one", connects)
	}
	if refused := here.Refused + there.Refused; cfg.Counted && a.strike != nil && !a.message && refused == 0 {
		t.Error("no refusal was counted")
	}
	for name, s := range map[string]Stats{"attacked": here, "other": there} {
		if s.MRsFailed != s.MRsRecovered {
			t.Errorf("%s: %d MRs were hurt, and %d recovered, recycled or orphaned", name, s.MRsFailed, s.MRsRecovered)
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
