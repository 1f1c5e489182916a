package lab

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A station is the other end of a port's cable, in place of a guest.
type station struct {
	*port
	fd int
}

func newStation(t *testing.T, l *Link) station {
	t.Helper()
	p, err := l.join(netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	s := station{port: p}
	s.plugIn(t)
	return s
}

// plugIn connects a cable for the rest of the test.
func (s *station) plugIn(t *testing.T) {
	t.Helper()
	f, err := s.plug()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s.fd = int(f.Fd())
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, o, &unix.Timeval{Sec: 60}); err != nil {
			t.Fatal(err)
		}
	}
}

var broadcast = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// frame returns a frame from s.
func (s station) frame(to [6]byte, body string) []byte {
	// IEEE 802 reserves EtherType 88b5 for experiments.
	return append(append(append(to[:], s.mac[:]...), 0x88, 0xb5), body...)
}

// put sends a frame over the cable.
func (s station) put(t *testing.T, to [6]byte, body string) {
	t.Helper()
	if _, err := unix.Write(s.fd, s.frame(to, body)); err != nil {
		t.Fatal(err)
	}
}

// pass makes the switch forward a frame synchronously.
func (s station) pass(to [6]byte, body string) { s.link.forward(s.port, s.frame(to, body)) }

// want reads a frame and compares its body. With an empty body it checks that no frame is there.
func (s station) want(t *testing.T, body string) {
	t.Helper()
	flags := 0
	if body == "" {
		flags = unix.MSG_DONTWAIT
	}
	b := make([]byte, maxFrame)
	n, _, err := unix.Recvfrom(s.fd, b, flags)
	got := ""
	if err == nil {
		got = string(b[ethernetHeader:n])
	} else if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	if got != body {
		t.Errorf("station %v got %.20q (%v), want %.20q", s.addr, got, err, body)
	}
}

// TestSwitchForwardsFrames sends frames between three ports.
func TestSwitchForwardsFrames(t *testing.T) {
	l := NewLink(t)
	a, b, c := newStation(t, l), newStation(t, l), newStation(t, l)
	jumbo := string(bytes.Repeat([]byte("j"), 65536))
	a.put(t, b.mac, jumbo)
	b.want(t, jumbo)
	c.put(t, a.mac, "back")
	a.want(t, "back")

	a.pass(b.mac, "one")
	b.want(t, "one")
	b.pass(broadcast, "all")
	a.want(t, "all")
	c.want(t, "all")
	a.pass(a.mac, "self")
	l.forward(a.port, []byte("short"))
	none := func() {
		t.Helper()
		for _, s := range []station{a, b, c} {
			s.want(t, "")
		}
	}
	none()

	l.Cut()
	a.pass(b.mac, "lost")
	none()
	l.Restore()
	a.pass(b.mac, "two")
	b.want(t, "two")
	for _, cut := range []*port{a.port, b.port} {
		l.set(&cut.cut, true)
		a.pass(b.mac, "lost")
		b.pass(broadcast, "lost")
		a.want(t, "")
		b.want(t, "")
		l.set(&cut.cut, false)
	}
	c.want(t, "lost") // from b, while a was cut
	none()

	b.unplug()
	a.pass(b.mac, "lost")
	b.plugIn(t)
	none()
	a.pass(b.mac, "three")
	b.want(t, "three")
}

// TestStalledPortLosesOnlyItsFrames checks that only a port that accepts no frames loses frames.
func TestStalledPortLosesOnlyItsFrames(t *testing.T) {
	l := NewLink(t)
	a, b, c := newStation(t, l), newStation(t, l), newStation(t, l)
	const size, frames = 8192, 4 * portBuffer / 8192
	body := string(bytes.Repeat([]byte("s"), size))
	begin := time.Now()
	for range frames {
		a.put(t, b.mac, body)
	}
	a.put(t, c.mac, "past")
	c.want(t, "past")
	if took := time.Since(begin); took < stallLimit {
		t.Errorf("got lost frames after %v, want at least stallLimit", took)
	}
	kept := 0
	for buf := make([]byte, maxFrame); ; kept++ {
		if _, _, err := unix.Recvfrom(b.fd, buf, unix.MSG_DONTWAIT); err != nil {
			break
		}
	}
	if kept == 0 || kept >= frames {
		t.Errorf("got %d of %d frames at the stalled port, want some", kept, frames)
	}
	a.pass(b.mac, "again")
	b.want(t, "again")
}

// TestLinkAssignsUniqueAddresses checks that a link assigns addresses, and accepts none twice.
func TestLinkAssignsUniqueAddresses(t *testing.T) {
	l := NewLink(t)
	for _, c := range []struct {
		chosen, want string
		bad          bool
	}{
		{want: "10.9.0.1/24"},
		{chosen: "192.0.2.7/30", want: "192.0.2.7/30"},
		{want: "10.9.0.3/24"},
		{chosen: "10.9.0.3/16", bad: true},
	} {
		var chosen netip.Prefix
		if c.chosen != "" {
			chosen = netip.MustParsePrefix(c.chosen)
		}
		p, err := l.join(chosen)
		if (err != nil) != c.bad {
			t.Fatalf("%+v: %v", c, err)
		}
		if err == nil && p.addr.String() != c.want {
			t.Errorf("%+v: got address %v", c, p.addr)
		}
	}
}
