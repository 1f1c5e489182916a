package mount

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func testRing(size int) *trace.Ring {
	return trace.NewRing(size, func(uint8) string { return "success" })
}

// tracedMount serves the control API for a table with one mount that has the given rings.
func tracedMount(t *testing.T, rings ...*trace.Ring) (c *control.Client, dir string, mount *fakeMount) {
	t.Helper()
	mount = newFakeMount()
	mount.rings = rings
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return mount, nil })
	if _, err := tab.Mount(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := control.Listen(socket, control.Group{})
	kit.Must(t, err)
	srv := control.NewServer(tab, control.Version, nil, control.Group{})
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-served; l.Release() })
	return control.NewClient(socket), r.Dir, mount
}

func add(r *trace.Ring, xids ...uint32) {
	for _, x := range xids {
		r.Add(trace.Event{Kind: trace.PostSend, XID: x, N: 2, A: 100})
	}
}

type traceLine struct {
	Seq        *uint64
	Event, XID string
	Connection *int
	Lost       uint64
}

func parseLines(t *testing.T, text string) (lines []traceLine) {
	t.Helper()
	for one := range strings.Lines(text) {
		var l traceLine
		if err := json.Unmarshal([]byte(one), &l); err != nil {
			t.Fatalf("%v: %q", err, one)
		}
		lines = append(lines, l)
	}
	return lines
}

func TestTraceOfKeptEvents(t *testing.T) {
	a, b := testRing(8), testRing(8)
	add(a, 1, 2)
	add(b, 3)
	add(a, 4)
	c, dir, _ := tracedMount(t, a, nil, b) // the second connection keeps no events
	for _, tt := range []struct {
		last int
		want string // connection:XID of each event
	}{{-1, "0:1 0:2 1:3 0:4"}, {2, "1:3 0:4"}, {0, ""}, {100, "0:1 0:2 1:3 0:4"}} {
		var out bytes.Buffer
		if err := c.Trace(context.Background(), control.TraceRequest{Dir: dir, JSON: true, Last: tt.last},
			&out); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range parseLines(t, out.String()) {
			got = append(got, string(rune('0'+*l.Connection))+":"+strings.TrimPrefix(l.XID, "0x"))
		}
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("events with last %d: got %q, want %q", tt.last, s, tt.want)
		}
	}
	var out bytes.Buffer
	if err := c.Trace(context.Background(), control.TraceRequest{Dir: dir, Last: 1}, &out); err != nil ||
		!strings.HasPrefix(out.String(), "#0 ") ||
		!strings.Contains(out.String(), "post_send     xid=0x4 requests=2 inline=100\n") {
		t.Errorf("text: got %q and error %v, want the event of connection 0", out.String(), err)
	}
}

// follow starts a trace. It returns the lines of the trace, and a channel that receives the error
// at its end.
func follow(ctx context.Context, c *control.Client, r control.TraceRequest) (*bufio.Reader, <-chan error) {
	pr, pw := io.Pipe()
	ended := make(chan error, 1)
	r.Follow = true
	go func() {
		err := c.Trace(ctx, r, pw)
		pw.Close()
		ended <- err
	}()
	return bufio.NewReader(pr), ended
}

// await reads lines until a line contains text.
func await(t *testing.T, lines *bufio.Reader, text string) {
	t.Helper()
	for {
		l, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("wait for a line with %q: %v", text, err)
		}
		if strings.Contains(l, text) {
			return
		}
	}
}

func waitForEnd(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(kit.Timeout):
		t.Fatal("trace did not end")
		return nil
	}
}

// The trace shows the last events of the mount.
func TestTraceEndsWithMount(t *testing.T) {
	ring := testRing(64)
	c, dir, mount := tracedMount(t, ring)
	add(ring, 0xa)
	lines, ended := follow(context.Background(), c, control.TraceRequest{Dir: dir, Last: 1})
	await(t, lines, "xid=0xa")
	add(ring, 0xb)
	await(t, lines, "xid=0xb")
	add(ring, 0xc)
	mount.end()
	await(t, lines, "xid=0xc")
	go io.Copy(io.Discard, lines)
	if err := waitForEnd(t, ended); err != nil {
		t.Error(err)
	}
}

func TestTraceEndsWithReader(t *testing.T) {
	ring := testRing(64)
	c, dir, _ := tracedMount(t, ring)
	ctx, interrupt := context.WithCancel(context.Background())
	add(ring, 0xa)
	lines, ended := follow(ctx, c, control.TraceRequest{Dir: dir, Last: 1})
	await(t, lines, "xid=0xa")
	go io.Copy(io.Discard, lines)
	interrupt()
	if err := waitForEnd(t, ended); err != nil {
		t.Error(err)
	}
}

// TestTraceFormatsLostEvents adds more events than a ring holds. Events read and events lost add
// up.
func TestTraceFormatsLostEvents(t *testing.T) {
	ring := testRing(16)
	for _, tt := range []struct {
		rings []*trace.Ring
		json  bool
		want  string
	}{
		{[]*trace.Ring{ring}, false, "… 17 events lost\n"},
		{[]*trace.Ring{ring}, true, "{\"lost\":17}\n"},
		{[]*trace.Ring{testRing(16), ring}, false, "… #1 17 events lost\n"},
		{[]*trace.Ring{testRing(16), ring}, true, "{\"connection\":1,\"lost\":17}\n"},
	} {
		s := newTraceStream(tt.rings, nil, &control.TraceRequest{JSON: tt.json})
		for range 33 {
			add(ring, 7)
		}
		s.round(false)
		first, rest, _ := strings.Cut(s.out.String(), "\n")
		if first+"\n" != tt.want || strings.Count(rest, "\n") != 33-17 {
			t.Errorf("got %q and %q, want %q and 16 events", first, rest, tt.want)
		}
	}
}

func TestTraceErrors(t *testing.T) {
	c, dir, _ := tracedMount(t, nil)
	err := c.Trace(context.Background(), control.TraceRequest{Dir: dir}, io.Discard)
	isError(t, err, control.CodeUsage, "-o trace=1024")
	isError(t, err, control.CodeUsage, dir)
	err = c.Trace(context.Background(), control.TraceRequest{Dir: filepath.Dir(dir)}, io.Discard)
	isError(t, err, control.CodeNotMounted, "nfsrdmad list")
	isError(t, c.Trace(context.Background(), control.TraceRequest{Dir: dir, Last: -2}, io.Discard), control.CodeUsage,
		`last = "-2"`)
	b := newFakeBuilder()
	tab, r := testTable(t, b.build)
	done := make(chan struct{})
	go func() { defer close(done); _, _ = tab.Mount(context.Background(), r) }()
	<-b.begun
	_, _, err = tab.findRings(context.Background(), r.Dir)
	isError(t, err, control.CodeNotMounted, "mount not complete")
	b.result <- newFakeMount()
	<-done
}
