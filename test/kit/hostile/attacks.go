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
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var cred = sunrpc.AppendAuthNone(nil)

// An attack is an action of the server that the protocol forbids. Unless a field says otherwise,
// the server attacks the write chunk of a READ, after the call has ended.
type attack struct {
	name   string
	access faults.Attack // if it has an opcode
	// onWrite: the server attacks the read chunk of a WRITE.
	onWrite bool
	// pending: the server attacks before it replies to the call, when the key is still valid.
	pending bool
	// other: the server attacks on the connection of another client.
	other bool
	// freed: the client frees the memory and allocates it again before the attack.
	freed bool
	// harmless: the connection may survive the attack.
	harmless bool
	// twice: the server sends the reply twice.
	twice bool
	// invalidates: the reply invalidates the key of the call, which the client did not permit.
	invalidates bool
	// twoCalls: the attack needs two calls in flight. The reply to one invalidates the key of the
	// other.
	twoCalls bool
}

// attackBytes is the length of the attacks in bytes, and the filler of their data.
const (
	attackBytes  = 64
	attackFiller = 0xbd
)

var (
	write      = faults.Attack{Opcode: verbs.OpRDMAWrite}
	read       = faults.Attack{Opcode: verbs.OpRDMARead}
	invalidate = faults.Attack{Opcode: verbs.OpSendWithInv}
)

// key, index and beyond change an attack.
func key(a faults.Attack, n int8) faults.Attack {
	a.Key = n
	return a
}

func index(a faults.Attack, n int32) faults.Attack {
	a.Index = n
	return a
}

// beyond moves the attack across the end of the memory.
func beyond(a faults.Attack) faults.Attack {
	a.Offset = attackSize - 1
	return a
}

var attacks = []attack{
	{name: "late write", access: write},
	{name: "late read", access: read, onWrite: true},
	{name: "late write to freed memory", access: write, freed: true},
	{name: "late read of freed memory", access: read, onWrite: true, freed: true},
	{name: "write with the next key", access: key(write, 1)},
	{name: "write with the next index", access: index(write, 1)},

	{name: "write with another key of the same index, call pending", access: key(write, -1), pending: true},
	{name: "write with the previous index, call pending", access: index(write, -1), pending: true},
	{name: "write to a read chunk, call pending", access: write, onWrite: true, pending: true},
	{name: "read of a write chunk, call pending", access: read, pending: true},
	{name: "write beyond the end, call pending", access: beyond(write), pending: true},
	{name: "read beyond the end, call pending", access: beyond(read), onWrite: true, pending: true},
	{name: "write with the key of another connection", access: write, pending: true, other: true},
	{name: "read with the key of another connection", access: read, onWrite: true, pending: true, other: true},

	{name: "reply sent twice", twice: true, harmless: true},
	{name: "invalidation of an unknown key", access: index(invalidate, 1<<15)},
	{name: "invalidation of the call's key without a request", invalidates: true, pending: true, harmless: true},
	{name: "invalidation of another call's key", twoCalls: true, pending: true},
	{name: "invalidation of a key of another connection", access: invalidate, pending: true, other: true},
}

// accessesMemory reports whether the attack is an RDMA Write or Read.
func (a *attack) accessesMemory() bool {
	return a.access.Opcode == verbs.OpRDMAWrite || a.access.Opcode == verbs.OpRDMARead
}

// run attacks through the connection of a call with the segment s, and returns the status that the
// server gets. An RDMA Read succeeds whenever it returns memory of the client.
func (a *attack) run(c *conn, s rpcrdma.Segment) verbs.Status {
	if a.twice {
		c.send(&verbs.WorkRequest{Opcode: verbs.OpSend}, c.mem.Buf[:attackBytes]) // still holds the reply
		return verbs.StatusWRFlushErr
	}
	if a.other {
		c = c.other()
	}
	data := bytes.Repeat([]byte{attackFiller}, attackBytes)
	at := c.attacker.Prepare(a.access, faults.Target{RKey: verbs.RKey(s.Handle), Addr: s.Offset}, data)
	ended := make(chan verbs.Status, 1)
	err := at.Post(c.qp, func(st verbs.Status, mem []byte) {
		if a.access.Opcode == verbs.OpRDMARead && bytes.IndexByte(mem, guard) >= 0 {
			st = verbs.StatusSuccess
		}
		ended <- st
	})
	if err != nil {
		return verbs.StatusWRFlushErr
	}
	st := c.wait(a.access.Opcode, ended)
	if a.access.Opcode == verbs.OpSendWithInv {
		return verbs.StatusWRFlushErr // the client may accept the message
	}
	return st
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
	if err := nfs3.NewClient(c).Read(ctx, cred, file(), 0, arena(t)[:100], &r); err != nil {
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
	c := nfs3.NewClient(attacked)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	buf, err := membuf.Alloc(attackSize)
	kit.Must(t, err)
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
	kit.Must(t, err)
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
		if st == verbs.StatusSuccess && !a.harmless && (a.access.Opcode == verbs.OpRDMARead || !cfg.Unanswered) {
			t.Error("attack succeeded")
		}
		t.Logf("status at the server: %v", st)
	case <-ctx.Done():
		t.Fatal("server did not attack")
	}
	// The clients read what the server sends after the attack, so accepted data is in memory then.
	a.checkClients(ctx, t, cfg, attacked, other)
	if i := bytes.IndexFunc(buf, func(r rune) bool { return r != guard }); i >= 0 {
		t.Fatalf("byte %d changed after the call had ended", i)
	}
}

// checkClients checks that both clients still read the right bytes, and checks their counters.
func (a *attack) checkClients(ctx context.Context, t *testing.T, cfg *Config, attacked, other Client) {
	t.Helper()
	for name, x := range map[string]Client{"attacked": attacked, "other": other} {
		next := arena(t)
		var r nfs3.ReadResult
		if err := nfs3.NewClient(x).Read(ctx, cred, file(), 4096, next, &r); err != nil ||
			r.N != attackSize || !right(next, 4096) {
			t.Errorf("next read on the %s connection: got %v and %d bytes, want %d right bytes", name, err, r.N,
				attackSize)
		}
	}
	here, there := attacked.Stats(), other.Stats()
	if connects := here.Connects + there.Connects; !a.harmless && connects < 3 {
		t.Errorf("got %d connections, want at least 3: the attack must end one", connects)
	}
	if refused := here.Refused + there.Refused; cfg.Counted && a.accessesMemory() && refused == 0 {
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
	kit.Must(t, err)
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
